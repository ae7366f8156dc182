"""An engine that lives as long as its server: answers join and leave at any step (continuous batching).

Each turn admits newcomers in the order of their arrival, reads a bounded number of tokens of their prompts
(filling.py), and adds one token to every row that runs. A prompt that begins like a row of the cache copies
those positions; equal prompts that join together are read once.

Cache and recording stay between requests, so the model's weights may change only after `release`. In float32
an answer is the one that Engine.stream gives to it alone. In bfloat16 rounding depends on the rows of a step
(kernels/decode_step/wide.py) and on what was copied, so a token of almost equal scores may differ.

S rows that get a token, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.units import plural
from unfreeze.generate.answer import Completion, Piece, Row, completed
from unfreeze.generate.choosing import Choice, Wish, choose_each
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.filling import ALONE, BESIDE, Part, Plan, score_prompt
from unfreeze.generate.places import Places, Seat
from unfreeze.generate.request import Adapters, Load, OneModel, Request, Top
from unfreeze.generate.room import Room
from unfreeze.generate.sampling import NotFinite
from unfreeze.generate.steps import Replayed, Step
from unfreeze.generate.stops import StopText
from unfreeze.models.blocks.extend_pass import CannotExtend

LOOK_AHEAD = 64  # requests behind one that waits for a prefix that are looked at in a turn


@dataclass
class Ended:
    """A request that is over. error: why there are no answers. gone: nobody waits for them."""

    request: Request
    answers: list[Completion] = field(default_factory=list[Completion])
    tops: list[Top] = field(default_factory=list[Top])
    error: BaseException | None = None
    gone: bool = False


@dataclass(eq=False)
class Group:
    """A request and its answers.

    waiting   numbers of the answers that have no row yet
    keys      what the random numbers of each answer are made of
    left      answers that have not ended
    begun     it has its version of the adapter
    """

    request: Request
    waiting: deque[int]
    keys: list[int]
    pieces: list[list[Piece]]
    tops: list[Top]
    left: int
    version: Hashable = ""
    begun: bool = False


class Live:
    """Answers requests turn by turn; for one thread.

    max_rows   answers sampled at once; None: as many as memory allows (room.py)
    shares_prefixes   False: every prompt is read whole, in one pass
    holds_new  True: no further request begins; those that have begun go on
    extends    a prompt can be read behind positions that are there; False once the model cannot
    waiting    requests that have not begun
    load       what it did in the last turn
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int | None = None,
        adapters: Adapters | None = None,
        shares_prefixes: bool = True,
    ):
        self.engine, self.model = engine, engine.model
        self.adapters: Adapters = OneModel() if adapters is None else adapters
        self.room = Room(engine, max_rows)
        self.holds_new = False
        state = self.model.state_bytes() or self.model.shape.rope.long is not None
        self.extends = shares_prefixes and not state
        self.waiting = 0
        self.load = Load()
        self.groups: deque[Group] = deque()  # of which answers wait
        self.places: Places | None = None
        self._step: Step | None = None
        self._waits_for_prefix = False
        self._has_extended = False  # a pass has read a prompt behind positions that are there
        self._of: dict[Seat, Group] = {}
        self._ended: list[Ended] = []
        self._counts: Counter[str] = Counter()

    # --- requests

    def add(self, request: Request) -> None:
        """Let a request wait. Raises UserError for one that cannot be answered."""
        request.prompt = list(request.prompt)
        self.engine.check([request.prompt], request.sampling, [max(1, request.most)], None)
        if request.most < 0:
            raise ConfigError(f"most is {request.most} new tokens; it must be at least 0")
        request.allows()
        n, keys = request.sampling.n, request.sampling.keys(1)
        pieces: list[list[Piece]] = [[] for _ in range(n)]
        tops: list[Top] = [[] for _ in range(n)]
        self.groups.append(Group(request, deque(range(n)), keys, pieces, tops, n))
        self.waiting += 1

    @property
    def busy(self) -> bool:
        """True while a turn has something to do."""
        return bool(self._of) or any(group.begun or not self.holds_new for group in self.groups)

    def _look(self) -> None:
        """Set `load`: other threads read it, and nothing else of this."""
        held = [] if self.places is None else [each for each in self.places.held if each is not None]
        running = sum(each.running for each in held)
        cache = None if self.places is None else self.places.cache
        self.load = Load(
            **self._counts,
            running=running,
            filling=sum(not each.free for each in held) - running,
            waiting=self.waiting,
            rows=cache.rows if cache else 0,
            positions=cache.capacity if cache else 0,
            cache=cache.nbytes if cache else 0,
        )

    def release(self) -> None:
        """Forget cache and recording: weights may change. Raises UserError while answers are sampled."""
        if self._of:
            raise UserError(f"still sampling {plural(len(self._of), 'answer')}: wait for the end")
        self.places = self._step = None
        self._look()

    def refuse(self, error: BaseException) -> list[Ended]:
        """End every request that has not begun, with this error."""
        ended = [Ended(group.request, error=error) for group in self.groups if not group.begun]
        self.groups = deque(group for group in self.groups if group.begun)
        self.waiting = 0
        self._count(refused=len(ended))
        self._look()
        return ended

    def fail(self, error: BaseException) -> list[Ended]:
        """End every request that has begun, with this error. -> all that have ended.

        The others get a new cache.
        """
        begun = {id(group): group for group in (*self._of.values(), *self.groups) if group.begun}
        self.places = self._step = None
        for group in begun.values():
            self._over(group, Ended(group.request, error=error))
        return self._taken()

    # --- a turn

    @torch.no_grad()
    def turn(self) -> list[Ended]:
        """Do one turn. -> the requests that it ended."""
        try:
            self._let_go()
            if parts := self._admit():
                self._fill(parts)
            if self.places is not None:
                self.places.close_ranks()
                if self.places.running:
                    self._next_tokens(self.places)
        except Exception as error:  # of no single request: all that have begun end with it
            return self.fail(error)
        return self._taken()

    def _taken(self) -> list[Ended]:
        self._look()
        ended, self._ended = self._ended, []
        return ended

    def _let_go(self) -> None:
        """End the requests that nobody waits for any more."""
        every = {id(group): group for group in (*self._of.values(), *self.groups)}
        for group in every.values():
            try:
                if group.request.left():
                    self._over(group, Ended(group.request, gone=True))
            except Exception as error:
                self._over(group, Ended(group.request, error=error))

    def _over(self, group: Group, ended: Ended, *, spoiled: bool = False) -> None:
        """End a request: its rows are free."""
        for seat in [seat for seat, own in self._of.items() if own is group]:
            self._leave(seat, spoiled=spoiled)
        if group in self.groups:
            self.groups.remove(group)
        if group.begun:
            self.adapters.leave(group.version)
        else:
            self.waiting -= 1
        self._ended.append(ended)
        bad = ended.error is not None
        self._count(gone=ended.gone, failed=bad, answered=not (ended.gone or bad))

    def _leave(self, seat: Seat, *, spoiled: bool = False) -> None:
        del self._of[seat]
        if self.places is not None:
            self.places.leave(seat, spoiled=spoiled)

    def _count(self, **more: int) -> None:
        for name, value in more.items():
            self._counts[name] += value

    # --- joining

    def _admit(self) -> list[Part]:
        """Return what the next pass reads: of prompts that have begun, then of newcomers, who get seats."""
        held = [] if self.places is None else [each for each in self.places.held if each is not None]
        plan = Plan(BESIDE if any(each.running for each in held) else ALONE, self.extends)
        for each in sorted(held, key=lambda each: each.used):
            if each.seat is None or each.running:
                continue
            if (part := plan.part(each.seat, len(each.ids))) is not None:
                plan.parts.append(part)
        passed = 0
        for group in list(self.groups):
            if self.holds_new and not group.begun:
                continue
            try:
                while group.waiting and self._seated(group, plan):
                    pass
            except UserError as error:  # its adapter is not there
                self._over(group, Ended(group.request, error=error))
                continue
            passed += bool(group.waiting)
            if passed and (not self._waits_for_prefix or passed > LOOK_AHEAD):
                break
        self.groups = deque(group for group in self.groups if group.waiting)
        return plan.parts

    def _seated(self, group: Group, plan: Plan) -> bool:
        """Give the next answer of a request a seat, if a row is free and the pass has room for its prompt."""
        version = group.version if group.begun else self.adapters.version(group.request.adapter)
        seat = self._sit(group, self._seat(group, version), plan)
        if seat is None:
            if not group.begun:
                self.adapters.leave(version)
            return False
        self.waiting -= not group.begun
        group.version, group.begun = version, True
        group.waiting.popleft()
        self._of[seat] = group
        return True

    def _sit(self, group: Group, seat: Seat, plan: Plan) -> Seat | None:
        """Give a seat a row of the cache and a part of the pass; None: it has to wait."""
        self._waits_for_prefix = False
        request, leader = group.request, plan.leader(seat)
        if leader is not None and not leader.whole:
            self._waits_for_prefix = True
            return None
        places = self._make_room(seat)
        if places is None:
            return None
        source, reused, part = None, 0, None
        if leader is None:
            if self.extends and not request.prompt_logprobs:
                source, reused = places.longest_prefix(request.prompt, seat.version, request.experts)
            if plan.shares_more(seat, reused):
                self._waits_for_prefix = True
                return None
            if (part := plan.part(seat, reused)) is None:
                return None
        place = places.place_for(part is None or part.whole, source, reused)
        if place is None:
            return None
        places.sit(place, seat, source, reused)
        if part is not None:
            plan.parts.append(part)
        elif leader is not None:
            leader.followers.append(seat)
            reused = len(request.prompt)
        self._count(reused=reused, prompt_tokens=len(request.prompt))
        return seat

    def _seat(self, group: Group, version: Hashable) -> Seat:
        request, number = group.request, group.waiting[0]
        positions = self.model.shape.max_positions - len(request.prompt)
        limit, full = min((request.most, "length"), (positions, "window"))
        decoder = self.engine.stream_decoder(request.prompt[-1])
        stops = StopText(request.sampling.stop)
        row = Row(number, 0, limit, full, group.keys[number], self.engine.stop_ids, decoder, stops)
        wish = Wish(request.sampling, logprobs=request.logprobs, top=request.top)
        return Seat(request, number, row, wish, request.allows()[number], version)

    def _make_room(self, seat: Seat) -> Places | None:
        """Return the places, with a free one; None if there is no memory for it now."""
        places = self.room.make(self.places, seat.need, seat.request.experts, self.extends, self._forget_step)
        if places is not None:
            self.places = places
        return places

    def _forget_step(self) -> None:
        """Drop the recording, which holds the cache's tensors, before they are replaced."""
        self._step = None

    # --- passes

    def _fill(self, parts: list[Part]) -> None:
        """Read parts of prompts; those that are whole then get their first token."""
        try:
            done = self._read_all(parts)
        except Exception as error:
            if len(parts) == 1 and not parts[0].followers:
                self._fault(parts[0].seat, error)
                return
            for seat in [seat for part in parts for seat in (part.seat, *part.followers)]:
                self._restart(seat)
                if seat in self._of:
                    self._fill([Part(seat, 0, len(seat.request.prompt))])  # one that is at fault fails alone
            return
        seats = [seat for seat, _ in done]
        if seats:
            self._chosen(seats, torch.stack([logits_V for _, logits_V in done]))

    def _restart(self, seat: Seat) -> None:
        places = self.places
        if places is not None and seat in self._of:
            held = places.held[places.of(seat)]
            assert held is not None
            held.ids, seat.request.prompt_scores = [], None

    def _read_all(self, parts: list[Part]) -> list[tuple[Seat, Tensor]]:
        """-> seats whose prompts are there, and the logits after them.

        A prompt that lacks only its last token runs: the next step reads that one.
        """
        behind = [part for part in parts if part.first]
        begins = [part for part in parts if not part.first]
        done: list[tuple[Seat, Tensor]] = []
        stepping: list[Part] = []
        assert self.places is not None
        if behind:
            try:
                stepping = [part for part in behind if part.steps]
                if not self._has_extended:
                    stepping = stepping[1:]  # one alone shows whether the model can
                done += self._read_some([part for part in behind if part not in stepping])
                self._has_extended = True
            except CannotExtend:
                self.extends = False
                self.places.keeps = False
                for part in behind:
                    self._restart(part.seat)
                    part.first, part.count = 0, len(part.seat.request.prompt)
                begins, stepping = [*begins, *behind], []
        done += self._read_some(begins)
        for part in stepping:
            self.places.run(part.seat)
        return done

    def _read_some(self, parts: list[Part]) -> list[tuple[Seat, Tensor]]:
        return self._read(parts) if parts else []

    def _read(self, parts: list[Part]) -> list[tuple[Seat, Tensor]]:
        """Read parts in one pass: all of them behind positions that are there, or none."""
        places = self.places
        assert places is not None
        self.adapters.assign([part.seat.version for part in parts])
        rows, first = [places.of(part.seat) for part in parts], [part.first for part in parts]
        batch = batch_of([part.tokens for part in parts], self.model.device)
        hidden_TD = self.model.fill(batch, places.cache, rows, first)
        done: list[tuple[Seat, Tensor]] = []
        last, whole = [], []
        end = 0
        for part, row in zip(parts, rows, strict=True):
            held = places.held[row]
            assert held is not None
            held.ids = held.ids[: part.first] + part.tokens
            if part.seat.request.prompt_logprobs and part.seat.number == 0:
                self.adapters.assign([part.seat.version])  # the head has rows of this part alone
                score_prompt(self.model, hidden_TD[end:], part, self.engine.num_ids)
            end += part.count
            if part.whole:
                last.append(end - 1)
                whole.append(part)
        if not whole:
            return done
        self.adapters.assign([part.seat.version for part in whole])
        logits_PV = self.model.logits(hidden_TD[last])[:, : self.engine.num_ids]
        for part, logits_V in zip(whole, logits_PV, strict=True):
            at, length = places.of(part.seat), len(part.seat.request.prompt)
            for seat in part.followers:
                place = places.of(seat)
                places.cache.copy(at, place, length)
                held = places.held[place]
                assert held is not None
                held.ids = list(part.seat.request.prompt)
            done += [(seat, logits_V) for seat in (part.seat, *part.followers)]
        for seat, _ in done:
            places.run(seat)
        return done

    def _next_tokens(self, places: Places) -> None:
        """Do a step of all rows that run."""
        held = [each for each in places.held[: places.running] if each is not None]
        seats = [each.seat for each in held if each.seat is not None]
        tokens = [seat.newest for seat in seats]
        self.adapters.assign([seat.version for seat in seats])
        if self._step is None:
            self._step = self.engine.steps(self.model, places.cache)
            if isinstance(self._step, Replayed):
                self._step.rows_return = True
        logits_SV = self._step(tokens)[:, : self.engine.num_ids]
        for each, token in zip(held, tokens, strict=True):
            each.ids.append(token)
        self._count(steps=1)
        self._counts["most_running"] = max(self._counts["most_running"], len(seats))
        self._chosen(seats, logits_SV)

    # --- tokens

    def _chosen(self, seats: Sequence[Seat], logits_SV: Tensor) -> None:
        """Choose a token for each seat, whose logits these are."""
        for seat in seats:
            self._prepare(seat)
        for seat, choice in zip(seats, choose_each(logits_SV, [seat.wish for seat in seats]), strict=True):
            if seat not in self._of:
                continue  # another answer to its request failed
            if seat.row.limit == 0:
                self._answered(seat)
            elif choice.fault is not None:
                self._fault(seat, choice.fault)
            else:
                self._push(seat, choice)

    def _prepare(self, seat: Seat) -> None:
        """Set what a seat's next choice depends on."""
        row, wish = seat.row, seat.wish
        if wish.sampling.temperature != 0:
            wish.uniform = row.uniform()
        if seat.allow is not None and row.limit:
            try:
                wish.allowed = seat.allow(list(row.tokens))
            except Exception as error:
                wish.allowed = None
                self._fault(seat, error)

    def _push(self, seat: Seat, choice: Choice) -> None:
        """Give a token to an answer, and to who listens."""
        group, row = self._of[seat], seat.row
        piece = row.push(choice.token, choice.logprob, choice.sampled_logprob)
        if row.ended and seat.request.experts:
            assert self.places is not None
            piece = replace(piece, experts=self.places.cache.route(self.places.of(seat)))
        if choice.top is not None:
            group.tops[seat.number].append(choice.top)
            piece = replace(piece, top=choice.top)
        group.pieces[seat.number].append(piece)
        self._counts["new_tokens"] += 1
        try:
            seat.request.heard(piece)
        except Exception as error:
            self._fault(seat, error)
            return
        if row.ended:
            self._answered(seat)

    def _answered(self, seat: Seat) -> None:
        """An answer is whole; the last one ends its request."""
        group = self._of[seat]
        self._leave(seat)
        group.left -= 1
        if not group.left:
            answers = [completed(each) if each else Completion([], "", "length") for each in group.pieces]
            self._over(group, Ended(group.request, answers, group.tops if group.request.top else []))

    def _fault(self, seat: Seat, error: BaseException) -> None:
        """End a request that is at fault; the others go on."""
        if seat in self._of:
            group = self._of[seat]
            self._over(group, Ended(group.request, error=error), spoiled=isinstance(error, NotFinite))
