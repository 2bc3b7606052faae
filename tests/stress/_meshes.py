"""Plans of random parameters on random meshes of up to 64 ranks, without a process for each.

For every rank the plan is made as that rank makes it. Then the messages of all are carried by hand:
what every owner puts together must be the matrix, and what every rank hears its part of the answer.
"""

import itertools
import math
import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ._calls import Package

MOST_RANKS = 64
WIRE = torch.float32


def play(package: Package, number: int) -> int:
    """How many chunks the ranks of that mesh exchanged; an error tells the problem."""
    problem = Problem(package, random.Random(number))
    try:
        return problem.check()
    except Exception as error:
        error.add_note("\n".join(problem.words()))
        raise


class Problem:
    """A mesh, parameters with placements on it, and the options of their group."""

    def __init__(self, package: Package, generator: random.Random) -> None:
        self.package = package
        self.distributed = package("distributed")
        self.planning = package("optimizers.sharded.partition")
        dims = generator.choice([1, 1, 2, 2, 3])
        most = generator.choices([4, 8, 16, MOST_RANKS], [40, 40, 17, 3])[0]
        mesh = [most + 1]
        while math.prod(mesh) > most:
            mesh = [generator.choice([1, 2, 2, 3, 4, 5, 8, 16, 64]) for _ in range(dims)]
        self.mesh = tuple(mesh)
        self.coordinates = tuple(itertools.product(*map(range, mesh)))
        self.ranks = len(self.coordinates)
        self.beta2 = generator.choice([None, 0.9])
        self.flow = package("optimizers.sharded.buffers").DistributedConfig(
            in_flight_bytes=generator.choice([1, 500, 4096, 2**28])
        )
        count = 4 if self.ranks <= 16 else 1
        self.params = [self._parameter(generator, k) for k in range(generator.randint(1, count))]

    def _parameter(self, generator: random.Random, number: int) -> dict[str, Any]:
        rows, columns = (generator.choice([1, 2, 3, 5, 8, 13, 32]) for _ in range(2))
        kind = generator.choice(["plain", "plain", "experts", "heads", "parts", "filters"])
        shape = {
            "plain": (rows, columns),
            "experts": (generator.choice([1, 3, 4, 8]), rows, columns),
            "heads": (4 * rows, columns),
            "parts": (3 + rows, columns),
            "filters": (rows, columns, 2, 2),
        }[kind]
        choices = [None, *range(min(len(shape), 3))]
        splits = []
        for place in range(len(self.mesh)):
            dim = generator.choice(choices)
            later = math.prod(self.mesh[place + 1 :])
            strided = dim is not None and later > 1 and generator.random() < 0.3
            splits.append((dim, later if strided else 1))
        return {
            "shape": shape,
            "kind": kind,
            "splits": splits,
            "sizes": (3, rows) if kind == "parts" else None,
            "heads": 4 if kind == "heads" else None,
        }

    def words(self) -> list[str]:
        return [f"mesh {self.mesh}, beta2 {self.beta2}, {self.flow}", *map(str, self.params)]

    def team(self, rank: int) -> Any:
        transport = self.distributed.Identity()
        return self.distributed.Team(transport, rank, self.coordinates, self.mesh)

    def layout(self, param: dict[str, Any]) -> Any:
        splits = tuple(self.distributed.Split(*split) for split in param["splits"])
        return self.distributed.Layout(param["shape"], self.mesh, splits)

    def check(self) -> int:
        self.layouts = [self.layout(param) for param in self.params]
        self.wholes = [torch.randn(layout.shape) for layout in self.layouts]
        self.made = [nn.Parameter(torch.zeros(layout.shape)) for layout in self.layouts]
        self.number = {param: k for k, param in enumerate(self.made)}
        plans = [self._plan(rank) for rank in range(self.ranks)]
        self._check_plans(plans)
        exchanged = [*zip(*(itertools.chain(*plan[0]) for plan in plans), strict=True)]
        for chunks in exchanged:
            self._carry(chunks)
        return len(exchanged)

    def _options(self, number: int) -> Any:
        """The options of the group; of every parameter the same but for how it is cut."""
        param, module = self.params[number], self.package("optimizers.groups.options")
        values = dict(self.package("optimizers.muon_adamw").DEFAULTS) | {"lr": 0.1}
        values |= {"beta2": self.beta2, "split_sizes": param["sizes"], "num_heads": param["heads"]}
        values["expert_keys"] = ("experts",) if param["kind"] == "experts" else None
        names = module.option_names(module.MuonOptions)
        return module.MuonOptions(**{name: values[name] for name in names})

    def _plan(self, rank: int) -> Any:
        """What `Sharing.divide` and `Sharing.plan` make on a rank, of layouts without a mesh."""
        cut = self.package("optimizers.groups.blocks").cut
        team, planning, matrices = self.team(rank), self.planning, []
        for number, (param, layout) in enumerate(zip(self.made, self.layouts, strict=True)):
            name = f"{self.params[number]['kind']}.{number}"
            options = self._options(number)
            blocks = cut(tuple(param.shape), name, options, name)
            if planning.local_blocks(blocks, layout, team) is None:
                matrices += planning.matrices_of(param, blocks, layout, team, None)
        group = planning.SharedGroup(
            0,
            team,
            matrices,
            WIRE,
            lambda m, n, *_: float(m * n * min(m, n)),
            self.beta2 is not None,
        )
        return planning.plan_shared([group], 1, self.flow)

    def _check_plans(self, plans: list[Any]) -> None:
        """All ranks agree on chunks and owners; together they own every matrix once."""

        def described(member: Any) -> tuple[Any, ...]:
            return self.number[member.param], member.job.region

        agreed = [
            [(tuple(map(described, c.members)), c.owners) for c in itertools.chain(*plan[0])]
            for plan in plans
        ]
        assert all(one == agreed[0] for one in agreed), "ranks plan other chunks or owners"
        home: Counter[Any] = Counter()
        for plan in plans:
            for chunk in (c for of_group in plan[1] for c in of_group):
                home.update(map(described, chunk.members))
        shared = Counter(member for members, _ in agreed[0] for member in members)
        twice = [m for m, times in (home + shared).items() if times != 1]
        assert not twice, f"matrices with several owners: {twice}"
        for k, param in enumerate(self.made):
            boxes = [region for n, region in [*home, *shared] if n == k]
            covered = torch.zeros(param.shape, dtype=torch.int32)
            for region in boxes:
                covered[tuple(slice(start, start + length) for start, length in region)] += 1
            once = not boxes or (covered == 1).all()
            assert once, f"parameter {k}: elements in {covered.unique()} matrices"

    def _carry(self, chunks: tuple[Any, ...]) -> None:
        """One chunk on all ranks: gather, answer with the negative, scatter."""
        routes = [chunk.route for chunk in chunks]
        members, owners = chunks[0].members, chunks[0].owners
        numbers = [self.number[member.param] for member in members]
        regions = [
            self.wholes[k][tuple(slice(s, s + n) for s, n in member.job.region)]
            for k, member in zip(numbers, members, strict=True)
        ]
        locals_ = [{k: self._local(k, rank) for k in set(numbers)} for rank in range(self.ranks)]
        outboxes = [torch.zeros(route.sent.size, dtype=torch.uint8) for route in routes]
        for rank, route in enumerate(routes):
            for part in route.sent.parts:
                held = part.box.view(locals_[rank][numbers[part.job]])
                part.of(outboxes[rank], WIRE).copy_(held)
        inboxes = self._delivered([r.sent for r in routes], [r.gathered for r in routes], outboxes)
        answers = [torch.zeros(route.answered.size, dtype=torch.uint8) for route in routes]
        for rank, route in enumerate(routes):
            put = {job: torch.full_like(regions[job], torch.nan) for job in route.owned}
            for part in route.gathered.parts:
                place = put[part.job][part.box.region]
                assert place.isnan().all(), f"rank {rank} gathers a part of job {part.job} twice"
                place.copy_(part.of(inboxes[rank], WIRE))
            for job, found in put.items():
                right = owners[job] == rank and torch.equal(found, regions[job])
                assert right, f"rank {rank} gathers job {job} wrongly"
            for part in route.answered.parts:
                if part.box is None:
                    answers[rank][part.start : part.stop] = part.job % 251
                else:
                    part.of(answers[rank], WIRE).copy_(-put[part.job][part.box.region])
        scattered = [r.scattered for r in routes]
        heard = self._delivered([r.answered for r in routes], scattered, answers)
        for rank, route in enumerate(scattered):
            self._check_answers(rank, route, heard[rank], members, locals_[rank])

    def _check_answers(self, rank: int, route: Any, heard: Tensor, members: Any, here: Any) -> None:
        """The rank heard of every element that it holds of the chunk, once."""
        held = {k: torch.zeros_like(value) for k, value in here.items()}
        extras = set()
        for part in route.parts:
            if part.box is None:
                extras.add(part.job)
                right = heard[part.start : part.stop] == part.job % 251
                assert right.all(), f"rank {rank}: statistics of job {part.job} wrong"
            else:
                place = held[self.number[members[part.job].param]]
                part.box.view(place).sub_(part.of(heard, WIRE))
        for job, member in enumerate(members):
            k = self.number[member.param]
            for box in member.job.held(rank):
                right = torch.equal(box.view(held[k]), box.view(here[k]))
                assert right, f"rank {rank} hears of job {job} wrongly"
            arrives = self.beta2 is None or (rank in member.keepers) == (job in extras)
            assert arrives, f"rank {rank}: statistics of job {job} do not arrive"

    def _local(self, number: int, rank: int) -> Tensor:
        """What a rank holds of that parameter."""
        held = self.wholes[number]
        for dim, runs in enumerate(self.layouts[number].runs(self.coordinates[rank])):
            parts = [held.narrow(dim, *run) for run in runs]
            held = torch.cat(parts, dim) if parts else held.narrow(dim, 0, 0)
        return held.contiguous()

    def _delivered(
        self, sent: list[Any], received: list[Any], outboxes: list[Tensor]
    ) -> list[Tensor]:
        """An all-to-all by hand; the sizes of both ends must agree."""
        pairs = zip(outboxes, sent, strict=True)
        pieces = [outbox.split(list(message.counts)) for outbox, message in pairs]
        inboxes = []
        for rank, message in enumerate(received):
            arriving = [pieces[other][rank] for other in range(self.ranks)]
            sizes = tuple(map(len, arriving))
            counts = message.counts
            assert sizes == counts, f"rank {rank} expects {counts}, is sent {sizes}"
            inboxes.append(torch.cat(arriving))
        return inboxes
