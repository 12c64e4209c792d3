"""What all tasks of a run say alike, whichever device they are for."""

from __future__ import annotations

from fleetlearn_protocol.messages import Task
from fleetlearn_protocol.secure.about import MaskTerms
from fleetlearn_protocol.secure.task_terms import terms_of

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.secure_tasks import secure_of_tasks
from fleetlearn_coordinator.service.task_privacy import privacy_of_tasks
from fleetlearn_coordinator.service.training_run.members import Members, RunMember
from fleetlearn_coordinator.service.training_run.private_budget import PrivateBudget
from fleetlearn_coordinator.service.training_run.run_models import RunModels


class RunTasks:
    """Makes the part of a task that does not depend on its device."""

    def __init__(
        self,
        plan: Plan,
        members: Members,
        prefix: str,
        models: RunModels,
        budget: PrivateBudget,
    ) -> None:
        """``prefix``: what the names of the run's tasks begin with, the first dash included."""
        self._plan, self._members, self._prefix = plan, members, prefix
        self._models, self._budget = models, budget
        self.secure = secure_of_tasks(plan, members.all[0].rules)
        """How devices mask their updates. None: they do not."""

    def shared(self, version: int, member: RunMember) -> Task:
        """Return a task that begins from this version of a member's model, without what is one
        device's: its name, round, vectors, encodings that not every device knows, seed and
        times."""
        local = self._plan.local
        private = privacy_of_tasks(
            member.rules.privacy, self._models.newest.privacy, self._budget.account
        )
        if self._plan.secure is not None:
            private = private._replace(clip=self._plan.secure.clip)
        return Task(
            task=self._prefix,
            round=0,
            bundle=member.bundle.sha256,
            vectors=(),
            parts=self._plan.parts(member.bundle.manifest),
            hyper=self._models.hyper_of(version, member),
            epochs=local.epochs,
            batch_size=local.batch_size,
            seed=0,
            deadline=0.0,
            time_budget=local.time_budget,
            evaluate=local.evaluate,
            algorithm=local.algorithm,
            personal_epochs=local.personal_epochs,
            secure=self.secure,
            schedule=self._plan.steps_of(version),
            function=local.function,
            **private._asdict(),
        )

    def mask_terms(self) -> MaskTerms:
        """Return what each device of the run signs beside its own update. A run has the same terms
        in all rounds of a process; where a start changes them, what was signed before is given up
        (participations.py). Raises ValueError in a run without a helper."""
        (only,) = self._members.all
        words = self._plan.masked_words(only.bundle.manifest)
        return terms_of(self.shared(self._models.newest.version, only), words)
