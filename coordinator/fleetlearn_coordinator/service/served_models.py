"""Which models and vectors devices can fetch, and in which form each device is sent its model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

import msgspec
from fleetlearn_protocol.encodings import FLOAT16, FLOAT32, OWN_FAMILY, UINT32, family
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import MODEL, CheckIn, SharedModel, VectorReference
from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.aggregation.sent_models import half_of
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.network.transfers.contents import Older
from fleetlearn_coordinator.plan.encoding_section import EncodingSection
from fleetlearn_coordinator.service.training_run.members import RunMember, first_fit
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.blobs import PARAMETERS, BytesWithin, StoredBytes
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.store import OPTIMIZER_STATE


def _why_not_up(encoding: EncodingSection, check_in: CheckIn) -> str:
    """Return why the device cannot encode its updates as the plan says; empty: it can."""
    own = encoding.own
    if own is None:
        known = family(encoding.up) in check_in.encodings
        return "" if known else f"it knows {', '.join(check_in.encodings)}"
    if OWN_FAMILY not in check_in.encodings and check_in.functions:
        return f"its software, {check_in.software or 'not known'}, has no own encodings"
    if own.function in check_in.functions:
        return ""
    allowed = ", ".join(check_in.functions) or "no function"
    option = own.function if ":" in own.function else f"{own.function}=MODULE:FUNCTION"
    return f"its owner allows {allowed}; --allow-function {option} allows it"


class ServedModels:
    """What of a run's models is served, and what its connected devices can do with it."""

    def __init__(self, run: Run, host: RunHost, served: ServedRun) -> None:
        self._run, self._host, self._served = run, host, served
        self._published: set[str] = set()
        """The SHA-256 of the newest model and of the vectors beside it, which are served."""
        self._half_digests: dict[tuple[int, int], str | None] = {}
        """Version and number of a member -> SHA-256 of its model as float16, for the newest and for
        those that tasks began from."""
        self._know_up: set[str] = set()
        """Devices that know the plan's encoding of updates. The others are asked for float32."""
        self._said = False
        """Whether it was said that there are such."""
        self._know_rows: set[str] = set()
        """Devices that can train sub-models. The others have whole tables."""
        self._know_half: set[str] = set()
        """Devices that know float16, if models travel so. The others are sent float32."""
        self._last_model: dict[str, str] = {}
        """Device -> SHA-256 of the model that it has, if models travel as differences."""

    # The devices

    def join(self, check_in: CheckIn) -> None:
        """The device of this check-in is connected."""
        device, encoding, models = check_in.device, self._run.plan.encoding, self._run.models
        self.leave(device)
        if why := _why_not_up(encoding, check_in):
            self._say_once(device, why)
        else:
            self._know_up.add(device)
        if UINT32.name in check_in.encodings:
            self._know_rows.add(device)
        if encoding.down == FLOAT16.name and FLOAT16.name in check_in.encodings:
            self._know_half.add(device)
        if encoding.down == "delta":
            known = {base for forms in models.forms for base in forms.deltas}
            known |= {each.digest for each in self._run.members.states_of(models.newest)}
            for base in check_in.models:
                if base in known:
                    self._last_model[device] = base

    def _say_once(self, device: str, why: str) -> None:
        """Say that devices do not know the plan's encoding: of the first of them."""
        plan = self._run.plan
        if self._said or plan.secure is not None or plan.algorithm.computes:
            return
        self._said = True
        self._run.log.info(
            'device %s does not know encoding.up = "%s" (%s): it sends float32, and so does each '
            "device that does not know it",
            device,
            plan.encoding.up,
            why,
        )

    def leave(self, device: str) -> None:
        """The device is not connected any more. Harmless where it was not."""
        self._know_up.discard(device)
        self._know_rows.discard(device)
        self._know_half.discard(device)
        self._last_model.pop(device, None)

    def parts_of(self, device: str, member: RunMember) -> dict[str, str]:
        """Return the parts that the device is asked for in a task of this member: name ->
        encoding."""
        plan = self._run.plan
        asked = plan.parts if device in self._know_up else plan.exact_parts
        manifest = member.bundle.manifest
        parts = asked(manifest)
        return plan.parts_of_rows(parts, manifest) if device in self._know_rows else parts

    def references(
        self, device: str, version: int, member: RunMember, beside: Collection[str] = ()
    ) -> tuple[VectorReference, ...]:
        """Let the device fetch a member's model of this version and the vectors beside it. Returns
        what a task says of them."""
        run, size = self._run, member.size
        self.publish()
        digests = run.models.digests_of(version, beside, member)
        # the device came back without its work, and goes on with it
        if version != run.engine.version:
            for sha256, where in self._find_older([(version, member)], beside).items():
                self._host.serve_older(self._served, sha256, where)
        found = {
            name: VectorReference(name, each, FLOAT32.size(size), FLOAT32.name)
            for name, each in digests.items()
        }
        half = self._half_digest(version, member) if device in self._know_half else None
        if half is not None:
            found[MODEL] = VectorReference(MODEL, half, FLOAT16.size(size), FLOAT16.name)
        elif run.plan.encoding.down == "delta":
            base = self._last_model.get(device)
            if version == run.engine.version and base is not None:
                deltas = run.models.forms[member.number].deltas
                found[MODEL] = msgspec.structs.replace(found[MODEL], delta=deltas.get(base))
            self._last_model[device] = digests[MODEL]
        return tuple(found.values())

    def newest_for(self, check_in: CheckIn) -> SharedModel | None:
        """Let a device that takes no part fetch the newest model, where the plan gives it. Returns
        what the welcome says of it."""
        run = self._run
        if check_in.wants != "model" or not run.plan.models.give:
            return None
        member = run.members.all[0]
        if run.plan.family:
            name = first_fit(run.plan.family, check_in)
            if name is None:
                return None
            member = run.members.named(name)
        self.publish()
        sha256 = run.models.member_state(member).digest
        model = VectorReference(MODEL, sha256, FLOAT32.size(member.size), FLOAT32.name)
        return SharedModel(member.bundle.sha256, model)

    # The contents

    def publish(self) -> None:
        """Serve the newest models in all their forms, the vectors beside them, and the older ones
        that tasks began from."""
        run, engine, state = self._run, self._run.engine, self._run.models.newest
        # A vector may change where the model stays as it is, bit for bit.
        beside = {state.vector_digests[name]: each for name, each in state.vectors.items()}
        vectors = {each.digest: each.model for each in run.members.states_of(state)} | beside
        if vectors.keys() == self._published:
            return
        self._published = {*vectors}
        versions = {terms.version for terms in engine.book.terms.values()}
        versions |= {series.version for series in engine.exchanges.values() if series.is_open}
        versions.discard(engine.version)
        newest: dict[str, Buffer] = {
            sha256: FLOAT32.encode(vector) for sha256, vector in vectors.items()
        }
        for forms in run.models.forms:
            newest |= forms.contents
        older = [(number, member) for number in sorted(versions) for member in run.members.all]
        self._half_digests = {
            (number, member.number): self._half_digest(number, member)
            for number, member in (*older, *((engine.version, each) for each in run.members.all))
        }
        self._host.publish(self._served, newest, self._find_older(older, run.plan.vectors))

    def _find_older(
        self, models: Iterable[tuple[int, RunMember]], beside: Collection[str]
    ) -> dict[str, Older]:
        """Return SHA-256 -> its bytes, for each of these versions of members that is there and for
        the vectors ``beside`` them. A model is not there only where a lost device came back with
        its work done: that one does not need it. One that cannot be opened now is not served:
        whoever fetches it is refused."""
        run = self._run
        found = {}
        for number, member in models:
            size = member.size
            try:
                for name, sha256 in run.models.digests_of(number, beside, member).items():
                    if sha256 in run.models.newest.vector_digests.values():  # served as the newest
                        continue
                    tensor = PARAMETERS if name == MODEL else OPTIMIZER_STATE + name
                    content: StoredBytes = run.store.blobs.open_tensor(number, tensor)
                    if run.members.is_family:
                        begin = FLOAT32.size(member.place.start)
                        content = BytesWithin(content, begin, FLOAT32.size(size))
                    found[sha256] = Older(content, FLOAT32.size(size))
                    if name == MODEL and (half := self._half_digest(number, member)) is not None:
                        found[half] = Older(content, FLOAT16.size(size), FLOAT16)
            except StoreError:
                continue
            except StoreUnavailableError as error:
                run.log.warning("an older model is not served: %s", error.text)
        return found

    def _half_digest(self, version: int, member: RunMember) -> str | None:
        """Return the SHA-256 of a member's model as float16; None if it does not travel so."""
        run = self._run
        if run.plan.encoding.down != FLOAT16.name:
            return None
        if version == run.engine.version:
            return run.models.forms[member.number].half
        key = version, member.number
        if key not in self._half_digests:  # its tasks were given by an earlier process
            self._half_digests[key] = None
            with suppress(StoreError):
                half = half_of(run.models.load_model(version)[member.place])
                self._half_digests[key] = None if half is None else digest(half)
        return self._half_digests[key]
