"""How the ranks of a job whose members change meet when they wrap a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import torch

from straggle.members.regrouped.elastic import ElasticChannel, MetAnew
from straggle.members.views.view import Elastic
from straggle.merge.alike import Wrapped
from straggle.merge.wire.channel import Channel
from straggle.version import __version__


def meet_members(
    elastic: Elastic,
    wrapped: Wrapped,
    make_alike: Callable[[Channel], None],
    *,
    give_up_s: float,
    of_replica: Channel | None = None,
    kind: str = "cpu",
) -> ElasticChannel:
    """The channel to the members, which have the same module and options; a rank that comes late asks nothing yet.

    ``make_alike(channel)`` compares the ranks' models and gives the model of rank 0 to all. ``of_replica``: the ranks
    that are a member together with this one. ``kind``: the type of device that the parameters are on.
    """
    channel = ElasticChannel(elastic, give_up_s=give_up_s, of_replica=of_replica, kind=kind)
    build = wrapped.options.get("straggle", __version__)
    versions = {"straggle": build, "torch": torch.__version__.partition("+")[0]}  # of a state that is given
    in_common = {**asdict(wrapped), **versions}
    channel.membership.joins.describe(json.dumps(in_common, sort_keys=True))
    try:
        while not channel.comes_late and not _become_alike(channel, make_alike):
            channel.meet_members()
            if channel.membership.is_under_way:
                break
        if channel.comes_late and wrapped.refusal:
            raise ValueError(wrapped.refusal)
    except BaseException:
        channel.part()
        raise
    return channel


def _become_alike(channel: ElasticChannel, make_alike: Callable[[Channel], None]) -> bool:
    """Call ``make_alike``; false if a rank was restarted meanwhile, so that the ranks have to meet again."""
    try:
        make_alike(channel)
        return channel.membership.has_wrapped(channel.patience.outside_s, channel.patience.words("outside"))
    except MetAnew:
        return False
