"""Build the dashboards: ``python deploy/grafana/build.py`` writes ``deploy/grafana/dashboards/*.json``.

Needs ``grafana-foundation-sdk`` (the extra ``dev``) and Python 3.11. Grafana reads only the JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    common,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUN = 'job=~"$job", run=~"$run"'  # a run without the label `run` is matched by All
RANK = f'{RUN}, rank=~"$rank"'
WINDOW = "[$__rate_interval]"


# -- queries


def rate(name: str, labels: str = RUN) -> str:
    return f"rate(straggle_{name}{{{labels}}}{WINDOW})"


def per_rank(expr: str) -> str:
    """One series for each rank, also where a run went on at another address."""
    return f"sum by (job, run, rank) ({expr})"


def group_mean(name: str, count: str = "step_seconds_count") -> str:
    """Of all ranks, for each step."""
    return f"sum by (job, run) ({rate(name)}) / (sum by (job, run) ({rate(count)}) > 0)"


def rank_mean(name: str, labels: str = RANK) -> str:
    """Of one rank, for each step that it applied."""
    return f"{per_rank(rate(name, labels))} / ({per_rank(rate('steps_total', labels))} > 0)"


def dropped(group: str, labels: str) -> str:
    lost, all_ = (rate(f"gradient_elements{kind}_total", labels) for kind in ("_dropped", ""))
    return f"sum by ({group}) ({lost}) / (sum by ({group}) ({all_}) > 0)"


def stage_dropped(group: str, labels: str) -> str:
    """1 less the mean share of the stage that was computed."""
    mine = f"sum by (job, run, rank, stage) ({rate('stage_contributions_total', labels)})"
    share = f"{mine} / on (job, run, rank) group_left () ({per_rank(rate('steps_total', labels))} > 0)"
    return f"clamp_min(1 - avg by ({group}) ({share}), 0)"


def now(name: str, labels: str = RANK, reduce: str = "max by (job, run, rank)") -> str:
    return f"{reduce} (straggle_{name}{{{labels}}})"


def link_rate(direction: str) -> str:
    return now("link_bytes_per_second", f'{RANK}, direction="{direction}"')


def network_mean() -> str:
    labels = f'{RUN}, phase="network"'
    seconds, steps = (rate(f"phase_seconds_{part}", labels) for part in ("sum", "count"))
    return f"sum by (job, run) ({seconds}) / (sum by (job, run) ({steps}) > 0)"


def firing(labels: str) -> str:
    none = 'label_replace(vector(0), "alertname", "none", "", "")'
    return f'count by (alertname, rank) (ALERTS{{alertstate="firing", {labels}}}) or on () {none}'


# -- panels


def closed_row(title: str, *panels: Any) -> build.Row:
    """A row of panels that is not drawn before a reader opens it."""
    row = build.Row(title)
    for number, panel in enumerate(panels, start=101):  # behind those of the board itself
        row.with_panel(panel.id(number))
    return row


def query(expr: str, legend: str = "") -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).legend_format(legend).datasource(SOURCE).range()


def snapshot(expr: str, legend: str = "") -> prometheus.Dataquery:
    """The last value only."""
    return prometheus.Dataquery().expr(expr).legend_format(legend).datasource(SOURCE).instant()


def with_targets(panel: Any, title: str, description: str, targets: list[Any]) -> Any:
    panel.title(title).description(description).datasource(SOURCE)
    for position, target in enumerate(targets):
        panel.with_target(target.ref_id("ABCDEF"[position]))
    return panel


def lines(title: str, unit: str, description: str, targets: dict[str, str], *, stacked: bool = False) -> Any:
    """Curves over time; ``targets``: expressions by legend."""
    panel = with_targets(
        timeseries.Panel(), title, description, [query(expr, legend) for legend, expr in targets.items()]
    )
    panel.unit(unit).height(8).span(12).axis_soft_min(0).line_width(1)
    panel.show_points(common_models.VisibilityMode.NEVER).fill_opacity(60 if stacked else 0)
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.legend(common.VizLegendOptions().show_legend(True).display_mode(common_models.LegendDisplayMode.LIST))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return panel


def share(title: str, description: str, targets: dict[str, str], **how: bool) -> Any:
    return lines(title, "percentunit", description, targets, **how)


def rows(title: str, unit: str, most: float, description: str, expr: str, legend: str) -> Any:
    """One row for each series: green at 0, red at ``most``."""
    panel = with_targets(statetimeline.Panel(), title, description, [query(expr, legend)])
    panel.unit(unit).min(0).max(most).decimals(0).height(10).span(24).per_page(32).merge_values(False)
    panel.show_value(common_models.VisibilityMode.NEVER).fill_opacity(90).line_width(0)
    panel.legend(common.VizLegendOptions().show_legend(False))
    return panel.color_scheme(build.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_GR_YL_RD))


def number(title: str, unit: str, description: str, expr: str, *, bad_from: float | None = None) -> Any:
    """One number with its course; red from ``bad_from``."""
    panel = with_targets(stat.Panel(), title, description, [query(expr, "{{run}}")])
    panel.unit(unit).height(4).span(4).graph_mode(common_models.BigValueGraphMode.AREA)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.thresholds(green_until(bad_from))


def green_until(bad_from: float | None) -> build.ThresholdsConfig:
    steps = [models.Threshold(color="green", value=None)]
    if bad_from is not None:
        steps.append(models.Threshold(color="red", value=bad_from))
    return build.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def bars(title: str, unit: str, description: str, expr: str, legend: str, *, bad_from: float) -> Any:
    """The last value of each series; red from ``bad_from``, as the longest bar may be a small number."""
    panel = with_targets(bargauge.Panel(), title, description, [snapshot(expr, legend)])
    panel.unit(unit).min(0).height(8).span(12).orientation(common_models.VizOrientation.HORIZONTAL)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.thresholds(green_until(bad_from))


def who_waits() -> Any:
    """For each rank one bar of its own work and what it waits."""
    waits = f'{RANK}, phase="wait"'
    expressions = (
        rank_mean("compute_seconds_sum"),
        f"{per_rank(rate('phase_seconds_sum', waits))} / ({per_rank(rate('steps_total', RANK))} > 0)",
    )
    targets = [snapshot(expr).format(PromQueryFormat.TABLE) for expr in expressions]
    panel = with_targets(
        barchart.Panel(),
        "Who waits for whom",
        "Seconds of a step that a rank works and waits. The ranks that wait least are those that the others wait for.",
        targets,
    )
    panel.unit("s").height(8).span(12).x_field("rank").stacking(common_models.StackingMode.NORMAL)
    panel.with_transformation(
        models.DataTransformerConfig(id_val="joinByField", options={"byField": "rank", "mode": "outer"})
    )
    hidden = {f"{name}{number}": True for name in ("Time", "job", "run") for number in ("", " 1", " 2")}
    names = {"Value #A": "own work", "Value #B": "waits"}
    return panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden, "renameByName": names})
    )


def who_hangs() -> Any:
    """The ranks that have been stuck in the time shown, with the line of code of each; those that are stuck, in red."""
    of = "max by (job, run, rank, where)"
    stuck = f'straggle_stuck_info{{{RANK}, where!=""}}'
    target = snapshot(f"{of} ({stuck}) or 0 * {of} (max_over_time({stuck}[$__range]))").format(PromQueryFormat.TABLE)
    text = "Ranks that have not gone on while others waited for them, and the line of code that they were in."
    panel = with_targets(table.Panel(), "Who hangs, and where", text, [target])
    panel.height(8).no_value("no rank has been stuck")
    states = {"0": {"text": "goes on", "color": "green"}, "1": {"text": "stuck", "color": "red"}}
    state = {"mappings": [{"type": "value", "options": states}], "custom.cellOptions": {"type": "color-text"}}
    for column, properties in {"rank": {"custom.width": 70}, "now": {"custom.width": 90, **state}}.items():
        panel.override_by_name(
            column, [models.DynamicConfigValue(id_val=key, value=own) for key, own in properties.items()]
        )
    return panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "job": True, "run": True},
                "indexByName": {"rank": 0, "Value": 1, "where": 2},
                "renameByName": {"Value": "now"},
            },
        )
    )


# -- dashboards


def run_panels() -> list[Any]:
    steps = "sum by (job, run) (" + rate("step_seconds_sum") + ")"
    return [
        build.Row("Now"),
        number("Step", "s", "Seconds of a step, from merge to merge.", group_mean("step_seconds_sum")),
        number("Deadline", "s", "Of the last step; nothing without one.", now("deadline_seconds", RUN, "max")),
        number(
            "Saved",
            "percentunit",
            "0.5: waiting for all ranks would take half as long again.",
            f"sum by (job, run) ({rate('step_wait_for_all_seconds_total')}) / ({steps} > 0) - 1",
        ),
        number("Dropped", "percentunit", "Share of all ranks' gradients.", dropped("job, run", RUN), bad_from=0.25),
        number("Loss", "short", "Mean over ranks of what was logged as loss.", now("loss", RUN, "avg by (job, run)")),
        number("Alerts", "short", "That fire.", f"sum({firing(RUN)})", bad_from=1),
        build.Row("Time"),
        lines(
            "Step time",
            "s",
            "A step, what it would take to wait for all ranks, and the deadline.",
            {
                "step": group_mean("step_seconds_sum"),
                "waiting for all ranks": group_mean("step_wait_for_all_seconds_total"),
                "deadline": now("deadline_seconds", RUN, "max by (job, run)"),
                "9 of 10 steps": (f"histogram_quantile(0.9, sum by (job, run, le) ({rate('step_seconds_bucket')}))"),
            },
        ),
        lines(
            "Own work",
            "s",
            "Seconds of a rank's own work in a step, with what it would have taken to finish what it left.",
            {"rank {{rank}}": rank_mean("untruncated_compute_seconds_total")},
        ),
        who_waits(),
        lines(
            "Throughput",
            "short",
            "Samples whose gradients came in time, and merged steps.",
            {
                "samples/s": f"sum by (job, run) ({rate('samples_total')})",
                "steps/s": f"max by (job, run) ({rate('steps_total')})",
            },
        ),
        build.Row("Lateness"),
        rows(
            "Late",
            "percentunit",
            1,
            "Share of its steps in which a rank was late.",
            f"clamp_max({rank_mean('late_steps_total')}, 1)",
            "rank {{rank}}",
        ),
        lines(
            "What late ranks were doing",
            "short",
            "How many ranks are late in a step, by cause.",
            {
                "{{cause}}": f"sum by (job, run, cause) ({rate('late_steps_total', RANK)}) "
                f"/ on (job, run) group_left () (max by (job, run) ({rate('steps_total')}) > 0)"
            },
            stacked=True,
        ),
        share(
            "Stood in",
            "Share of its steps that a rank's stand-in submitted, because it was stuck.",
            {"rank {{rank}}": rank_mean("stood_in_steps_total")},
        ),
        lines(
            "Lag",
            "short",
            "Merged steps that a rank has not yet applied.",
            {"rank {{rank}}": now("lag_steps")},
        ),
        lines("Since its last step", "s", "Rises while a rank is stuck.", {"rank {{rank}}": now("since_step_seconds")}),
        who_hangs().span(24).height(6),
        lines(
            "Drawn",
            "short",
            "Micro-batches of a step's pool that a rank computed: a slow rank draws fewer; 0 where ranks do not draw.",
            {"rank {{rank}}": rank_mean("micro_batches_total")},
        ),
        lines(
            "Put back",
            "short",
            "Micro-batches that a rank had drawn and gave back because it was stuck, since its process began.",
            {"rank {{rank}}": per_rank(f"straggle_micro_batches_put_back_total{{{RANK}}}")},
        ),
        build.Row("Gradients"),
        share("Dropped", "Share of all ranks' gradients.", {"all ranks": dropped("job, run", RUN)}),
        share("Dropped by rank", "Share of a rank's gradients.", {"rank {{rank}}": dropped("job, run, rank", RANK)}),
        bars(
            "Dropped by stage",
            "percentunit",
            "Share of a stage that all ranks together did not compute in time.",
            f"sort({stage_dropped('job, run, stage', RUN)})",
            "{{stage}}",
            bad_from=0.25,
        ),
        share("Dropped by stage over time", "The same.", {"{{stage}}": stage_dropped("job, run, stage", RUN)}),
        lines(
            "Merged",
            "Bps",
            "Bytes of gradients that a rank merges in a second.",
            {"a rank": f"avg by (job, run) ({rate('merged_bytes_total')})"},
        ),
        lines("Loss", "short", "Mean over ranks, last step.", {"loss {{run}}": now("loss", RUN, "avg by (job, run)")}),
        lines(
            "On the network",
            "s",
            "Seconds of a step from when the last rank had submitted until all was merged.",
            {"a step": network_mean()},
        ),
        closed_row(
            "Links, if they are measured",
            rows(
                "Slow links",
                "percentunit",
                1,
                "Red while a rank's link is slower than the others' and makes steps longer.",
                now("link_slow"),
                "rank {{rank}}",
            ),
            lines(
                "Latency of links",
                "s",
                "Seconds until a first byte from a rank is with a peer, as pings measured it.",
                {"rank {{rank}}": now("link_latency_seconds")},
            ),
            lines(
                "Links, up", "Bps", "What a rank can send, as pings measured it.", {"rank {{rank}}": link_rate("up")}
            ),
            lines(
                "Links, down",
                "Bps",
                "What a rank can receive, as pings measured it.",
                {"rank {{rank}}": link_rate("down")},
            ),
        ),
        build.Row("Members"),
        lines(
            "Members",
            "short",
            "Ranks that take part, as far as each member knows; all ranks where none can leave.",
            {"rank {{rank}} knows of": now("members")},
        ),
        lines(
            "Changes",
            "short",
            "Ranks that left or joined since the run began, by reason: the process ended, no sign of life, an error of "
            "its own, started again, joined.",
            {"{{reason}}": f"max by (job, run, reason) (straggle_members_changes_total{{{RUN}}})"},
        ),
        rows(
            "Absent",
            "percentunit",
            1,
            "Red while the rank is absent.",
            f"max by (job, run, absent) (straggle_absent_rank{{{RUN}}})",
            "rank {{absent}}",
        ),
        lines(
            "Healing",
            "s",
            "Seconds from when a rank was let in until it had the state of its peers, since its process began.",
            {"rank {{rank}}": per_rank(f"straggle_healing_seconds_total{{{RANK}}}")},
        ),
        lines(
            "State received",
            "bytes",
            "Bytes of the state that a rank took from its peers to take part again, since its process began.",
            {"rank {{rank}}": per_rank(f"straggle_healing_bytes_total{{{RANK}}}")},
        ),
        build.Row("Health"),
        lines(
            "Not finite",
            "short",
            "Gradients of parameters left out since the run began, and steps in which no rank had others.",
            {
                "rank {{rank}}": per_rank(f"straggle_nonfinite_contributions_total{{{RANK}}}"),
                "skipped steps": f"max by (job, run) (straggle_skipped_steps_total{{{RUN}}})",
            },
        ),
        lines(
            "Replicas",
            "short",
            "Comparisons of all ranks' parameters, and those in which a rank's were not those of most ranks.",
            {
                "comparisons": f"max by (job, run) (straggle_replica_checks_total{{{RUN}}})",
                "rank {{rank}} differs": per_rank(f"straggle_replica_mismatches_total{{{RANK}}}"),
            },
        ),
        share(
            "Estimates used",
            "Share of steps in which an estimate was used in the stage.",
            {
                "{{stage}}": f"max by (job, run, stage) ({rate('estimates_total')}) "
                f"/ on (job, run) group_left () (max by (job, run) ({rate('steps_total')}) > 0)"
            },
        ),
        lines("Alerts", "short", "That fire; 0 without any.", {"{{alertname}} {{rank}}": firing(RUN)}, stacked=True),
    ]


def rank_panels() -> list[Any]:
    phases = (
        f"sum by (job, run, rank, phase) ({rate('phase_seconds_sum', RANK)}) "
        f"/ (sum by (job, run, rank, phase) ({rate('phase_seconds_count', RANK)}) > 0)"
    )
    in_full = rank_mean("untruncated_compute_seconds_total")
    median = f"quantile by (job, run) (0.5, {rank_mean('untruncated_compute_seconds_total', RUN)})"
    return [
        build.Row("Time"),
        lines("Phases", "s", "What a step of this rank is made of.", {"{{phase}}": phases}, stacked=True),
        lines(
            "Own work",
            "s",
            "Seconds of work in a step against the deadline; in full with what it would have taken to finish.",
            {
                "own work": rank_mean("compute_seconds_sum"),
                "in full": in_full,
                "median rank, in full": median,
                "deadline": now("deadline_seconds"),
            },
        ),
        lines(
            "Slowness",
            "short",
            "2: it takes twice as long for its own work as the median rank.",
            {"rank {{rank}}": f"{in_full} / on (job, run) group_left () {median}"},
        ),
        lines(
            "Lag and time since its last step",
            "short",
            "Live while its training thread is stuck.",
            {"lag (steps)": now("lag_steps"), "since its last step (s)": now("since_step_seconds")},
        ),
        lines(
            "Drawn",
            "short",
            "Micro-batches of a step's pool that it computed, and how many there were; 0 where ranks do not draw.",
            {"drawn": rank_mean("micro_batches_total"), "in the pool": rank_mean("pool_micro_batches_total")},
        ),
        who_hangs().span(12),
        build.Row("Lateness"),
        share(
            "Late, by what it was doing",
            "Share of its steps.",
            {
                "{{cause}}": f"sum by (job, run, rank, cause) ({rate('late_steps_total', RANK)}) "
                f"/ on (job, run, rank) group_left () ({per_rank(rate('steps_total', RANK))} > 0)"
            },
            stacked=True,
        ),
        share(
            "Stood in, by what it was doing",
            "Share of its steps that its stand-in handed in.",
            {
                "{{cause}}": f"sum by (job, run, rank, cause) ({rate('stood_in_steps_total', RANK)}) "
                f"/ on (job, run, rank) group_left () ({per_rank(rate('steps_total', RANK))} > 0)"
            },
            stacked=True,
        ),
        build.Row("Gradients"),
        share(
            "Reach and dropped",
            "Share of the model that it computed in the last step, and share of its gradients that were dropped.",
            {"reach": now("reach_ratio"), "dropped": dropped("job, run, rank", RANK)},
        ),
        bars(
            "Dropped by stage",
            "percentunit",
            "Share of a stage that this rank did not compute in time.",
            f"sort({stage_dropped('job, run, rank, stage', RANK)})",
            "{{stage}}",
            bad_from=0.25,
        ),
        lines(
            "Throughput",
            "short",
            "Samples whose gradients came in time.",
            {"samples/s": per_rank(rate("samples_total", RANK))},
        ),
        lines(
            "Health",
            "short",
            "Since the run began.",
            {
                "not finite": per_rank(f"straggle_nonfinite_contributions_total{{{RANK}}}"),
                "differs": per_rank(f"straggle_replica_mismatches_total{{{RANK}}}"),
                "alerts that fire": f"sum({firing(RANK)})",
            },
        ),
    ]


def variables(*, one_rank: bool) -> list[Any]:
    def chosen(name: str, of: str, text: str) -> build.QueryVariable:
        variable = build.QueryVariable(name).datasource(SOURCE).query(f"label_values({of}, {name})").description(text)
        return variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)

    job = chosen("job", "straggle_steps_total", "A scrape job of Prometheus.")
    run = chosen("run", 'straggle_steps_total{job=~"$job"}', "Label of the targets; All also where there is none.")
    rank = chosen("rank", f"straggle_steps_total{{{RUN}}}", "Whose curves to show.")
    rank.sort(models.VariableSort.NUMERICAL_ASC)
    if not one_rank:
        rank.multi(True).include_all(True).all_value(".*")
    source = build.DatasourceVariable("datasource").label("data source").type("prometheus")
    return [source, job, run.include_all(True).all_value(".*"), rank]


def board(title: str, uid: str, panels: list[Any], *, one_rank: bool) -> models.Dashboard:
    made = build.Dashboard(title).uid(uid).tags(["straggle"]).time("now-15m", "now").refresh("5s").readonly()
    made.tooltip(models.DashboardCursorSync.CROSSHAIR).variables(variables(one_rank=one_rank)).timezone("browser")
    others = build.DashboardLink("straggle").type(models.DashboardLinkType.DASHBOARDS).tags(["straggle"])
    made.link(others.include_vars(True).keep_time(True))
    for number, panel in enumerate(panels, start=1):
        panel.id(number)
        made.with_row(panel) if isinstance(panel, build.Row) else made.with_panel(panel)
    return made.build()


def dashboards() -> dict[str, str]:
    """The text of each file, by its name."""
    boards = {
        "run.json": board("straggle: a run", "straggle-run", run_panels(), one_rank=False),
        "rank.json": board("straggle: a rank", "straggle-rank", rank_panels(), one_rank=True),
    }
    return {name: json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n" for name, made in boards.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text)
