"""What `fleetlearn-coordinator result` shows of boosting."""

from __future__ import annotations

from typing import Any

from fleetlearn_protocol.typer_app import plain_table, show_table


def show_trees(found: dict[str, Any]) -> None:
    """Print what the trees go by. found: the computation's result."""
    if not found["trees"]:
        print("no tree is grown yet")
        return
    measured = "no loss is measured under noise"
    if found["loss"] is not None:
        measured = _losses(found["loss"])
    print(
        f"{found['trees']} trees with {found['splits']} splits, of {found['rows']} rows; {measured}"
    )
    table = plain_table("column", "share of the gain")
    for name, share in found["columns"].items():
        table.add_row(name, f"{share:.1%}")
    show_table(table)


def show_components(found: dict[str, Any]) -> None:
    """Print the chosen effects. found: the computation's result."""
    if not found["iterations"]:
        print("no effect is chosen yet")
        return
    print(
        f"{found['iterations']} iterations, of {found['rows']} rows; loss {found['loss']:.6g}\n"
        f"A score is {found['base']:.6g} and the effects of:"
    )
    table = plain_table("column", "effect", "chosen", "share of the gain", "what it adds")
    for effect in found["effects"]:
        share = f"{effect['share_of_gain']:.1%}"
        chosen = str(effect["iterations"])
        table.add_row(effect["column"], effect["kind"], chosen, share, _added(effect))
    show_table(table)


def _losses(loss: dict[str, float]) -> str:
    text = f"loss {loss['training']:.6g}"
    if loss["held_out"]:
        text += f", {loss['held_out']:.6g} on held-out rows"
    return f"{text} before the last boosting round"


def _added(effect: dict[str, Any]) -> str:
    if effect["kind"] == "linear":
        return f"{effect['intercept']:.4g} {effect['slope']:+.4g} x"
    if effect["kind"] == "spline":
        return ", ".join(f"{added:.3g} at {value:.4g}" for value, added in effect["points"][::2])
    return ", ".join(f"{added:.3g} for {code}" for code, added in enumerate(effect["effects"]))
