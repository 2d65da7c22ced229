"""Each text of the package that says what to do has a test that does it: a new one without such a test fails here."""

from __future__ import annotations

import re

from advice import Case, advising
from repository import ROOT

from tests.commands import test_advice_of_runs
from tests.ranks import (
    test_advice,
    test_advice_data,
    test_advice_frameworks,
    test_advice_later,
    test_advice_steps,
)
from tests.unit import test_advice as test_advice_on_values
from tests.unit.commands import test_advice_of_commands

MODULES = (test_advice, test_advice_data, test_advice_frameworks, test_advice_later, test_advice_steps)


def cases_of(table: object) -> list[Case]:
    """If it is a table of them."""
    return [one for one in table.values() if isinstance(one, Case)] if isinstance(table, dict) else []


# what a run shows, and help; they refuse nothing
SHOWN = {
    "__main__.py",
    "advise/words.py",
    "commands/train_elastic.py",
    "lab/comparison.py",
    "observe/findings.py",
}
HELP = {
    "Start the workers of a job, and start each that dies again, while the others go on.",
    "one file for each rank and start; else passed through",
    "load these once, and fork each worker from there",
    "%s is of %s, and this run has %s: shares, the estimator's memory, and random states of ranks that are new, begin ",
}
GROUPS = "tests/ranks/test_advice_data.py::test_process_group_is_made_as_the_texts_say"
# followed by tests of their own: words of the text, and the test
ELSEWHERE = {
    "stopped after step {} of {}; resume=true goes on from there, and": (
        "tests/commands/test_stopping.py::test_terminated_run_leaves_a_checkpoint_and_goes_on_as_if_it_had_not_been"
    ),
    "{}: must be a port, 1 to 65535, or 0 for any that is free": (
        "tests/unit/commands/test_launch_options.py::test_port_of_a_store_is_a_port"
    ),
    "Call it after the block, or seldom; the mean of a number needs no call of its own": (
        "tests/ranks/test_gathers.py::test_what_the_warning_says_to_do_gives_the_same_means_and_ends_the_wait"
    ),
    "call register_state() first for the model whose step comes first": (
        "tests/ranks/test_several_models.py::test_new_process_is_in_all_of_a_loops_models_and_holds_up_none"
    ),
    "start all ranks of the replica again, together": (
        "tests/ranks/test_replica_members.py::test_replica_of_a_killed_rank_leaves_and_comes_back_with_the_others_state"
    ),
    "write `with model.pause():` around an evaluation or a checkpoint of one rank, and the others wait for it": (
        "tests/ranks/test_habits.py::test_rank_that_works_alone_in_a_pause_is_waited_for_and_told_nothing"
    ),
    "after max_lag={} it needs a peer's state, and it is too late if the others' loops end before that": (
        "tests/ranks/test_habits.py::test_rank_that_works_alone_for_too_long_is_told_what_to_write_in_time_and_comes_back"
    ),
    "write step.log(loss=loss) and read model.last_report.scalars, or `with model.pause():` in place of a barrier": (
        "tests/ranks/test_habits.py::test_rank_that_works_alone_in_a_pause_is_waited_for_and_told_nothing"
    ),
    "let the error leave the block, or write model.step(num_microbatches=...) and let each pass reduce its": (
        "tests/ranks/test_sharded_by_chance.py::test_model_that_is_cut_anywhere_is_exact_in_that_step_and_the_next"
    ),
    "have all passes that FSDP accumulates in one block, and let an error of one of them leave it": (
        "tests/ranks/test_sharded_by_chance.py::test_model_that_is_cut_anywhere_is_exact_in_that_step_and_the_next"
    ),
    "start the script by `straggle launch --nproc-per-node N --replica-size S`": (
        "tests/docs/test_docs.py::test_replicas_example_goes_on_without_the_replica_whose_rank_dies"
    ),
    "for one that comes back, so write fully_shard(..., mesh=straggle.replica_mesh())": (
        "tests/docs/test_docs.py::test_replicas_example_goes_on_without_the_replica_whose_rank_dies"
    ),
    "leave init_process_group() out": "tests/ranks/test_replica_members.py::test_mesh_of_a_replica_says_what_it_needs",
    "and the model is sharded over {}: call fully_shard() over all {}": (
        "tests/ranks/test_replica_members.py::"
        "test_replica_whose_ranks_alone_are_the_default_group_leaves_and_comes_back"
    ),
    "each replica would train by itself: write members=Elastic()": (
        "tests/ranks/test_replica_members.py::"
        "test_replica_whose_ranks_alone_are_the_default_group_leaves_and_comes_back"
    ),
    "shard it as a parameter, or keep it out of what you register": (
        "tests/ranks/test_replica_members.py::"
        "test_state_is_given_as_shards_and_what_is_sharded_as_no_parameter_is_refused"
    ),
    "one after the other: write fully_shard(..., mesh=straggle.replica_mesh())": (
        "tests/ranks/test_replica_members.py::test_replicas_of_other_ranks_are_refused"
    ),
    "wait longer (deadline=), leave {} out, or see straggle watch": (
        "tests/ranks/test_drops.py::test_what_the_line_says_to_do_helps"
    ),
    "loaded data for each: write for batch in straggle.LateLoader(model, loader)": (
        "tests/ranks/test_drops.py::test_what_the_line_says_to_write_for_a_rank_that_loads_slowly_helps"
    ),
    "write for batch in straggle.LateLoader(model, loader)": (
        "tests/ranks/test_slow_loading.py::test_loop_of_ones_own_is_told_what_keeps_a_late_rank_from_loading_for_each_step"
    ),
    "{}, and {}; or leave it out": (
        "tests/ranks/test_slow_loading.py::test_loop_of_ones_own_is_told_what_keeps_a_late_rank_from_loading_for_each_step"
    ),
    "{}, or leave it out": (
        "tests/ranks/test_slow_loading.py::test_rank_with_a_fixed_delay_keeps_its_share_and_is_named_with_its_place_and_what_to_do"
    ),
    "its deadline stops it there; look what it waits for, or leave it out": (
        "tests/ranks/test_slow_loading.py::test_what_is_said_to_do_helps"
    ),
    "so --nproc-per-node must be a multiple of it": (
        "tests/unit/commands/test_launch_options.py::test_replica_that_would_be_on_two_nodes_is_refused"
    ),
    "are started again together, so it must be a multiple of --replica-size": (
        "tests/commands/test_spares.py::test_spares_that_cannot_be_are_refused"
    ),
    "so there are none: write members=Elastic()": (
        "tests/commands/test_spares.py::test_job_that_trains_with_all_ranks_or_none_has_no_spare"
    ),
    "dealt from step to step, in one batch each; leave it out, and give the loader a larger batch_size": (
        "tests/ranks/test_accelerate.py::test_what_members_do_not_go_with_is_told_what_to_do"
    ),
    "in one batch each; leave it out, and set a larger per_device_train_batch_size": (
        "tests/ranks/test_transformers.py::test_what_would_wait_for_a_stuck_rank_is_refused_with_what_to_do"
    ),
    "also for those that are gone: leave them out, or members=": (
        "tests/ranks/test_transformers.py::test_what_would_wait_for_a_stuck_rank_is_refused_with_what_to_do"
    ),
    "members= needs the loader that is trained on": (
        "tests/ranks/test_accelerate.py::test_what_members_do_not_go_with_is_told_what_to_do"
    ),
    "prepared without the model: give both to one call of prepare()": (
        "tests/ranks/test_accelerate.py::test_what_members_do_not_go_with_is_told_what_to_do"
    ),
    "no checkpoint in {}: start without resume=true first": (
        "tests/ranks/test_checkpoint.py::test_loading_what_is_not_there_is_refused"
    ),
    "and this run's is one {}: give the parallel= that it was made with": (
        "tests/ranks/test_sharded_saved.py::test_checkpoint_that_is_damaged_or_of_another_kind_of_model_is_refused"
    ),
    "run_dir must be on storage that all ranks see": (
        "tests/ranks/test_checkpoint.py::test_ranks_that_do_not_see_the_same_checkpoint_are_refused"
    ),
    "which no fork has: leave it to the workers": (
        "tests/commands/test_preload.py::test_module_that_cannot_be_loaded_is_refused_before_a_worker_starts"
    ),
    "no report: %r; try again with: python -m straggle report %s": (
        "tests/commands/test_report_page.py::test_command_writes_the_page_and_says_where"
    ),
    "is in use by {}: wait for the end of that run, or give another run_dir": (
        "tests/unit/commands/test_run_dir.py::test_run_whose_first_rank_was_killed_keeps_others_out_while_any_of_its_"
        "ranks_is_there"
    ),
    "if you trust this one, name it on the command line too: {}={}": (
        "tests/unit/commands/test_untrusted.py::test_replay_builds_what_its_own_command_line_names"
    ),
    "this version of straggle has none of that name: repeat a run with its own version": (
        "tests/unit/commands/test_untrusted.py::test_replay_of_a_run_that_another_version_recorded_says_so"
    ),
    "start ranks by torchrun, or write straggle.watch(model) in the script, behind DistributedDataParallel(.": (
        "tests/commands/test_watch.py::test_ranks_that_the_script_starts_itself_are_recorded"
    ),
    "name those that are slow, and not all; where no fault strikes some ranks alone, leave `without` out of methods": (
        "tests/ranks/test_compare.py::"
        "test_without_a_slow_rank_the_others_train_on_the_same_samples_and_hand_on_what_they_have"
    ),
    "this needs: pip install 'straggle[{}]'": (
        "tests/commands/test_extras.py::test_extras_that_errors_and_pages_name_are_those_of_pyproject"
    ),
    "repeat them with steps={}, or give the first {} decisions alone": (
        "tests/ranks/test_replay.py::test_steps_in_which_members_had_changed_are_refused_in_a_replay_and_those_before_are_not"
    ),
    "straggle needs a process group: launch with torchrun and call torch.distributed.init_process_group() be": GROUPS,
    'if a rank alone has a copy of the model: write dist.init_process_group("gloo"), or leave members out': GROUPS,
    'in a running job. This is {}: update torch, or write dist.init_process_group("gloo")': GROUPS,
}
# refused by these, and done as they say by them or by the others of their file
ELSEWHERE |= {
    words: f"tests/ranks/{test}"
    for test, texts in {
        "test_microbatches.py::test_who_says_it_too_late_is_told_so": (
            "backward passes of this step have come, and are being merged; set it before the last one",
        ),
        "test_microbatches.py::test_calls_in_the_wrong_order_are_refused": (
            "begin() it, or use it as `with model.step()`",
        ),
        "test_cost.py::test_all_ranks_know_what_a_step_cost_over_the_mean": (
            "must be a positive number, such as the tokens",
        ),
        "test_uneven.py::test_weight_that_is_not_positive_is_refused": (
            "must be a positive number, such as the samples of this rank's step",
        ),
        "test_uneven.py::test_weight_that_comes_after_a_gradient_is_refused": (
            "step.weight comes before the first backward pass",
        ),
        "test_uneven.py::test_empty_loader_is_refused": ("give every rank at least one batch",),
        "test_loggers.py::test_what_is_no_logger_is_refused": ("every={}: log after at least one step",),
        "test_pull.py::test_wrong_uses_are_refused_with_what_to_write": (
            "micro-batches need as many positive weights",
            "micro-batches need as many positive costs",
            "leave out num_microbatches=... and step.weight, and give step.pull(parts, weights=...)",
            "step.weight beside step.pull(): give step.pull(parts, weights=...)",
        ),
        "test_whole_steps.py::test_wrong_uses_of_a_seed_are_refused_with_what_to_write": (
            "call it inside of that loop",
            "leave out optimizer=, and call optimizer.step() after the block",
        ),
        "test_pull.py::test_ranks_with_other_costs_are_told_so": ("so give every rank the same costs",),
        "test_pull.py::test_ranks_with_other_pools_are_told_so": ("give every rank all micro-batches of the step",),
    }.items()
    for words in texts
}
# of trainers of frameworks: refused by these, and trained with what is said by the tests beside them
ELSEWHERE |= dict.fromkeys(
    (
        "would wait for a stuck one: leave it out, and count tokens in your data_collator",
        "set per_device_train_batch_size",
    ),
    "tests/ranks/test_transformers.py::test_what_would_wait_for_a_stuck_rank_is_refused_with_what_to_do",
)
ELSEWHERE |= dict.fromkeys(
    ("write training_step(self, batch, batch_idx)", "would be in different steps: use another optimizer"),
    "tests/ranks/test_lightning.py::test_what_is_refused_is_told_what_to_do",
)
ELSEWHERE |= dict.fromkeys(
    (
        "give that call to another Trainer, with devices=1",
        "leave it out, and give train_dataloader() a larger batch_size",
        "use one optimizer with automatic optimization, or a loop of your own",
        "an epoch is each sample once; leave it out, and give a smaller data set",
        "and a rank that comes back does not have its state; leave it out",
    ),
    "tests/unit/test_members_of_lightning.py::"
    "test_what_ranks_that_come_back_could_not_follow_is_refused_with_what_to_do",
)
# of models that are sharded inside of each replica
ELSEWHERE |= dict.fromkeys(
    ("Give each of them its own part of every micro-batch, parts of equal size",),
    "tests/ranks/test_sharded_pull.py::test_without_faults_no_step_is_made_again",
)
ELSEWHERE |= dict.fromkeys(
    (
        "Give all ranks of a replica the same number, such as by DistributedSampler(drop_last=True) over them",
        "mesh= and {}: {}; leave {} out",
        'write StagedDataParallel(model, mesh=mesh["dp_replicate"]), the mesh over which replicas are copies',
        "shard the model by fully_shard(), and write",
        "let no branch depend on a rank's own data",
        "use torch 2.13 or newer",
        "write process_group=mesh.get_group(), or leave it out",
        "give the one over which replicas are copies, such as",
        "they must have this rank in common and no other",
        "each rank must be in one replica, and a replica has the entire model",
        "call fully_shard() on the entire model as well, after its blocks",
        "use fully_shard() alone, over all of them",
        "leave offload_policy out",
    ),
    "tests/ranks/test_sharded_refused.py::test_what_the_refusals_of_sharded_models_say_to_write_trains",
)
ELSEWHERE |= dict.fromkeys(
    (
        "Leave it out: change a gradient by parameter.register_post_accumulate_grad_hook(...)",
        "leave fully_shard() and mesh= out, and multiply the loss by ranks / factor",
    ),
    "tests/ranks/test_sharded_settings.py::test_what_is_said_instead_of_refused_settings_gives_the_gradients",
)
ELSEWHERE |= dict.fromkeys(
    (
        "use fully_shard() instead of FullyShardedDataParallel",
        "no parameter is trained; give the model that is",
        "give the model, which is an nn.Module",
    ),
    "tests/ranks/test_watched_jobs.py::test_what_cannot_be_watched_is_refused_with_what_to_do",
)
# of gradients by hand and of parameters that change: the tests that do as the texts say
ELSEWHERE |= {
    words: f"tests/ranks/{test}"
    for test, texts in {
        "test_by_hand.py::test_what_the_errors_say_to_do_instead_trains": (
            "which is frozen, and so is not merged: unfreeze it before the block, or leave it out",
            "compute them all by torch.autograd.grad, or change the merged ones after the block",
            "or give each rank micro-batches of its own",
            "outside of the block, and give them first values of data before wrapping",
            "Call loss.backward() inside of `with model.step()`, with a loss that depends on this model's parameters",
        ),
        "test_by_hand.py::test_gradients_that_the_loop_puts_in_place_are_merged_wherever_it_zeroes_them": (
            "and the parameter has {}: give it that of the parameter",
            "was put into its p.grad after a backward pass: zero_grad() before the block",
        ),
        "test_freezing.py::test_parameters_that_change_alike_on_all_ranks_are_trained_by_the_mean_gradient": (
            "{}: change parameters on all ranks before the same step",
            "freeze, unfreeze, add or replace parameters on all ranks before the same step",
        ),
    }.items()
    for words in texts
}
# what no test here can follow
NOT_HERE = {
    "a module uses a CUDA device as it is loaded, which no fork can: leave it to the workers": "a CUDA device",
    "needs Linux: leave it out": "another system",
    "nobody has the job's state; begin from a checkpoint": "all members are gone",
    "too few would have been left: go on from the checkpoint of that step": "all members are gone",
    "StagedTrainer takes the place of DDP, and this job is of kind {}: use Trainer": "DeepSpeed or FSDP",
    "StagedAccelerator takes the place of DDP, and this job is of kind {}: use Accelerator": "DeepSpeed or FSDP",
}
TABLES = (
    *(one.says for module in MODULES for table in vars(module).values() for one in cases_of(table)),
    *test_advice_on_values.VALUES,
    *test_advice_on_values.ARGUMENTS,
    *test_advice_of_commands.COMMANDS,
    *test_advice_of_runs.SAYS,
)
LISTED = (*TABLES, *ELSEWHERE, *NOT_HERE, *HELP)


def meant(says: str) -> set[str]:
    """The texts that these words are of: the one that has no others, or else those that have them."""
    found = {text.words for text in advising() if text.where not in SHOWN and says in text.words}
    return {says} if says in found else found


def test_each_advice_is_followed_by_a_test():
    followed = {words for says in LISTED for words in meant(says)}
    missing = [text for text in advising() if text.where not in SHOWN and text.words not in followed]
    assert not missing, "no test follows the advice of: " + "; ".join(f"{text.where}: {text.words}" for text in missing)


def test_each_case_is_of_one_text():
    for says in LISTED:
        assert len(meant(says)) <= 1, (says, meant(says))


def test_what_is_listed_beside_the_cases_is_there():
    for says in (*ELSEWHERE, *NOT_HERE, *HELP):
        assert meant(says), says
    for name in ELSEWHERE.values():
        path, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_texts_are_found_with_their_values_and_without_docstrings():
    words = {text.words for text in advising()}
    assert "parameter {} is not initialized: run one forward pass of the lazy module first" in words
    assert not any("Raise ``ValueError``" in text for text in words)
