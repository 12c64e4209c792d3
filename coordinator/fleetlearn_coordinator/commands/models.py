"""The commands of ``fleetlearn-coordinator`` that are about the versions of a run's model.

What reads models is imported by the commands that do: ``models`` lists what is recorded of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import plain_table, say, show_table

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.commands.options import AsJson, Ca, PlanFile, Token, WordsAndRun
from fleetlearn_coordinator.commands.show import listed
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.rounds.settings import MEASURED_ON

app = typer.Typer()


@app.command()
def models(
    words: WordsAndRun = None,
    as_json: AsJson = False,
    gone: Annotated[
        bool, typer.Option("--all", help="Also the versions whose files are not kept.")
    ] = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List the versions of the model: what is kept and why, and what was measured of each."""
    where, names = split(words, 0, 1, "RUN")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        shown = target.models(names[0] if names else None, gone=gone)
    if as_json:
        print(msgspec.json.encode(shown).decode())
        return
    columns = list(
        dict.fromkeys(
            (source, name)
            for row in shown
            for source, metrics in row.metrics.items()
            for name in metrics
        )
    )
    measured = (f"{name} ({source})" for source, name in columns)
    table = plain_table("version", "made", "kept", "MiB", "change", *measured)
    for row in shown:
        made = "initial" if not row.version else f"round {row.round}"
        if row.restores is not None:
            made = f"of {row.restores}, rolled back"
        size = "" if row.size is None else f"{row.size / 2**20:.1f}"
        change = "" if row.change is None else f"{row.change:.3g}"
        values = [row.metrics.get(source, {}).get(name) for source, name in columns]
        cells = ("" if value is None else f"{value:.4g}" for value in values)
        table.add_row(str(row.version), made, row.kept or "", size, change, *cells)
    show_table(table)
    _explain(dict.fromkeys(source for source, _ in columns))


@app.command("compare-models")
def compare_models(
    plan: PlanFile,
    first: Annotated[int, typer.Argument(help="A version that is kept.")],
    second: Annotated[int, typer.Argument(help="Another one.")],
    most: Annotated[
        int,
        typer.Option(help="How many parameters to show, the one that changed most first.", min=1),
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show how far two versions of the model are apart, in which parameters, and what was measured
    of each."""
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.service.versions import compare

    with expected_errors():
        found = compare(Plan.load(plan), first, second)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    cosine = "none" if found.cosine is None else f"{found.cosine:.6f}"
    norms = " and ".join(f"{norm:.4g}" for norm in found.norms)
    print(f"distance {found.distance:.4g} (L2), cosine {cosine}, norms {norms}")
    table = plain_table("parameter", "shape", "change", "of its norm", "largest element")
    for row in found.parameters[:most]:
        share = f"{row.change / row.norm:.2%}" if row.norm else ""
        shape = " x ".join(map(str, row.shape)) or "1"
        table.add_row(row.name, shape, f"{row.change:.4g}", share, f"{row.largest:.4g}")
    show_table(table)
    table = plain_table("metric", *(f"version {version}" for version in found.versions))
    for source, metrics in found.metrics.items():
        for name, pair in metrics.items():
            table.add_row(
                f"{name} ({source})", *("" if value is None else f"{value:.4g}" for value in pair)
            )
    if found.metrics:
        show_table(table)
        _explain(found.metrics)


WHO_MEASURED = {
    "round": "the devices of the round that began with it",
    "evaluation": "the devices of an evaluation of it",
    "held-out": "a process beside the coordinator",
}


def _explain(sources: Iterable[str]) -> None:
    """Say who measured a version, and on whose examples."""
    for source in sources:
        print(f"({source}): measured by {WHO_MEASURED[source]}, on {MEASURED_ON[source]}")


@app.command("evaluate-held-out")
def evaluate_held_out(
    plan: PlanFile,
    data: Annotated[Path, typer.Option(metavar="FILE.npz", help="The bundle's arrays.")],
) -> None:
    """Measure the models that are kept on held-out data, here and now. A model that was measured
    before is not measured again."""
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.service.held_out import measure_by_hand

    log_at("INFO")
    with expected_errors():
        found = measure_by_hand(Plan.load(plan), data)
    for version, result in found.items():
        print(f"version {version}: {result['examples']} examples, {listed(result['metrics'])}")


@app.command("export-model")
def export_model(
    plan: PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    version: Annotated[
        str | None,
        typer.Option(
            metavar="N|newest|measured|best",
            help=(
                "Which model. Default: the one that met the target, or the best with patience, "
                "where that ended the run; else the newest."
            ),
        ),
    ] = None,
    member: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which of the models, where the plan has [family]."),
    ] = None,
    as_bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Write a training bundle, for a new run that begins with this model."
        ),
    ] = False,
) -> None:
    """Write the trained model as an ONNX file that any ONNX Runtime runs, or as a bundle. Of a
    run whose devices tell class scores (FedMD): the public examples and the scores, as .npz."""
    from fleetlearn_protocol import write_inference_model
    from fleetlearn_protocol.computations.kinds import KINDS
    from fleetlearn_protocol.public_examples import consensus_file

    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.service.onward_bundle import write_onward_bundle
    from fleetlearn_coordinator.service.status import read_model
    from fleetlearn_coordinator.service.versions import choose_version, model_of

    with expected_errors():
        settings = Plan.load(plan)
        chosen = choose_version(settings, version)
        number, vector = read_model(settings.data_dir, chosen.version)
        algorithm = settings.local.algorithm
        if settings.algorithm.computes and KINDS[algorithm].infer is None:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"{plan}: this run computes {algorithm} and has no model; "
                f"`fleetlearn-coordinator result {plan}` shows what came out",
            )
        bundle, vector = model_of(settings, member, vector)
        if settings.algorithm.scores and (as_bundle or output.suffix != ".npz"):
            raise FleetError(
                Code.BAD_MESSAGE,
                f"{plan}: devices keep their models, and this run has the mean of their class "
                f"scores. {output} cannot hold that; expected a file .npz, without --bundle",
            )
        draft = output.with_name(output.name + ".draft")
        try:
            if settings.algorithm.scores:
                draft.write_bytes(consensus_file(bundle, vector))
            elif as_bundle:
                write_onward_bundle(bundle, vector, draft)
            else:
                draft.write_bytes(write_inference_model(bundle, vector))
            draft.replace(output)
        except OSError as error:  # its own text would name the draft
            raise OSError(error.errno, error.strerror, str(output)) from None
    size = output.stat().st_size
    what = "a bundle that begins with " if as_bundle else ""
    what += f"{member} of " if member else ""
    say(f"wrote {what}version {number} ({chosen.why}) to {output} ({size} bytes)")
    personal = bundle.manifest.local_size - bundle.manifest.size
    if personal:
        say(
            f"{personal} personal parameters have the bundle's initial values: the trained are on "
            "the devices"
        )
