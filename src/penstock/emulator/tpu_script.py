"""What happens in the world by itself: preemptions and other happenings of the script, and those that a test asks for.

`google` hangs it on the timeline; its control address calls `happen`. It chooses nodes and moments, and leaves to the
cloud what a happening does. Chance is drawn per rule and node from the world's seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from penstock.emulator.tpu_cloud import Cloud
from penstock.emulator.tpu_nodes import Node
from penstock.emulator.tpu_words import TpuRefusal, bad_argument
from penstock.emulator.tpu_world import Geography, Happening, Preemption, drawn


class Script:
    """Follows a world's rules."""

    def __init__(self, cloud: Cloud, geography: Geography) -> None:
        self._cloud = cloud
        self._geography = geography
        self._timeline = cloud.timeline
        self._struck = [0] * len(cloud.world.preemptions)
        cloud.listeners.append(self._heard)
        for happening in cloud.world.happenings:
            self._timeline.at(self._timeline.begin + happening.at_s, partial(self._scheduled, happening))
        for index, rule in enumerate(cloud.world.preemptions):
            if rule.at_s is not None:
                self._timeline.at(self._timeline.begin + rule.at_s, partial(self._at_moment, index, rule))

    def happen(self, happening: Happening) -> list[str]:
        """Do it now; the names of the nodes that it was done to."""
        if happening.what == "create":
            return [self._create(happening).name]
        nodes = [
            node
            for node in list(self._cloud.books.nodes.values())
            if fnmatchcase(node.id, happening.name) and fnmatchcase(node.zone, happening.zone)
        ]
        for node in nodes:
            self._deed(happening, node)()
        return [node.name for node in nodes]

    def _scheduled(self, happening: Happening) -> None:
        try:
            self.happen(happening)
        except TpuRefusal as refused:
            now = self._timeline.now
            self._cloud.books.record(now, "happening.refused", happening.name, happening.zone, why=refused.message)

    def _deed(self, happening: Happening, node: Node) -> Callable[[], None]:
        cloud = self._cloud
        deeds: dict[str, Callable[[], None]] = {
            "preempt": lambda: cloud.preempt(node, notice_s=happening.notice_s),
            "maintain": lambda: cloud.maintain(node, happening.seconds, happening.notice_s),
            "notify_host": lambda: cloud.notify_host(node, happening.host, happening.notice_s),
            "stop_host": lambda: cloud.stop_host(node, happening.host),
            "start_host": lambda: cloud.start_host(node, happening.host),
            "replace_host": lambda: cloud.replace_host(node, happening.host),
            "die_unseen": lambda: cloud.die_unseen(node),
            "fail": lambda: cloud.fail(node),
            "hide": lambda: cloud.hide(node, True),
            "show": lambda: cloud.hide(node, False),
            "delete": lambda: cloud.vanish(node),
        }
        return deeds[happening.what]

    def _create(self, happening: Happening) -> Node:
        """Somebody makes a node by hand: a foreign one, or an orphan that carries a label of ours."""
        offered = self._geography.offered(happening.zone)
        if happening.type not in offered:
            raise bad_argument(f"{happening.type!r} is not offered in {happening.zone!r}", "type")
        name = f"projects/{happening.project}/locations/{happening.zone}/nodes/{happening.name}"
        if name in self._cloud.books.nodes:
            raise bad_argument(f"{name} exists already", "name")
        accelerator = offered[happening.type]
        spec = {"labels": dict(happening.labels), "runtimeVersion": accelerator.runtime_version or ""}
        node = self._cloud.make(name, spec, accelerator, happening.type, spot=happening.spot)
        self._cloud.bring_up(node, lambda _: None)
        return node

    # --- preemption ---

    def _heard(self, node: Node | None) -> None:
        """A node entered a state: rules that count from there begin to count."""
        if node is None or node.gone_at is not None:
            return
        for index, rule in enumerate(self._cloud.world.preemptions):
            if rule.at_s is None and node.state == rule.state and self._aimed(rule, node):
                self._count_down(index, rule, node)

    def _count_down(self, index: int, rule: Preemption, node: Node) -> None:
        """Once for each time that the node enters the state; a change within it begins nothing."""
        key = f"{self._cloud.world.seed}/preemption/{index}/{node.name}/{node.moved}"
        if node.counting.get(index) == node.moved:
            return
        node.counting[index] = node.moved
        rng = random.Random(key)
        if rule.per_hour is not None:
            wait = rng.expovariate(rule.per_hour / 3600) if rule.per_hour > 0 else None
        else:
            wait = drawn(rule.after_s or 0.0, rng)
        if wait is not None:
            moved = node.moved
            self._timeline.after(wait, lambda: self._take(index, rule, node) if node.moved == moved else None)

    def _at_moment(self, index: int, rule: Preemption) -> None:
        for node in list(self._cloud.books.nodes.values()):
            if node.state == rule.state and self._aimed(rule, node):
                self._take(index, rule, node)

    def _take(self, index: int, rule: Preemption, node: Node) -> None:
        if node.gone_at is None and self._struck[index] < rule.most:
            self._struck[index] += 1
            self._cloud.preempt(node, notice_s=rule.notice_s, undo_delete=rule.undo_delete)

    def _aimed(self, rule: Preemption, node: Node) -> bool:
        kind = node.spot or rule.any_kind
        there = fnmatchcase(node.zone, rule.zone) and fnmatchcase(node.type, rule.type)
        return kind and there and fnmatchcase(node.id, rule.name)
