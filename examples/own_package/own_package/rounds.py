"""Who is chosen, and when training is over."""


def most_examples(least: int = 1):
    """Choose the devices with the most examples; chance decides among equals."""

    def strategy(choice):
        ranked = []
        for device in choice.devices:  # in the order of their names
            chance = next(choice.random)
            if device.stated.examples >= least:
                ranked.append((-device.stated.examples, chance, device.name))
        return [name for _, _, name in sorted(ranked)[: choice.wanted]]

    return strategy


def enough_reports(reports: int):
    """Stop after this many reports."""

    def rule(committed):
        found = sum(each.reports for each in committed)
        return f"{found} reports are enough" if found >= reports else None

    return rule
