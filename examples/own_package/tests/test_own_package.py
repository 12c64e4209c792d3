"""fleetlearn's test kit makes the checks that its own algorithms pass."""

from fleetlearn_coordinator import testing as coordinator
from fleetlearn_protocol import testing as protocol
from fleetlearn_simulator import testing as simulator
from own_package import fleets, formats, rounds, server


def test_they_are_what_fleetlearn_expects():
    coordinator.check_selection(rounds.most_examples(least=5))
    coordinator.check_stop_rule(rounds.enough_reports(reports=100))
    coordinator.check_aggregator(server.without_longest())
    coordinator.check_optimizer(server.heavy_ball())
    coordinator.check_weighing(server.root())
    coordinator.check_staleness(server.halved())
    protocol.check_encoding(formats.upper_bytes())
    simulator.check_availability(fleets.at_night())
    simulator.check_failures(fleets.half_way(chance=0.2))
    simulator.check_source(fleets.lines())
    simulator.check_partition(fleets.in_turn())
