"""Which test fails where perdure falls into a trap that its table calls met.

Checks of facts and words of symptoms are not here: `test_traps.py` has both sides of each.
"""

_LAUNCH = "unit/launch"
_GATE = f"{_LAUNCH}/test_pulling.py::test_the_gate_is_shut_by_each_lack"
_RSYNC = f"{_LAUNCH}/test_pulling.py::test_a_broken_transfer_goes_on_and_leaves_no_half_file"
_LINT = f"{_LAUNCH}/test_profiles.py::test_the_linter_finds_secrets_and_places_that_do_not_last"
_BOX = f"{_LAUNCH}/test_launched_box.py"
_KILLED_ON_BOX = "platforms/test_box_survival.py::test_what_is_killed_on_the_box_is_told_apart"
_VANISHED = "unit/telemetry/test_vanished.py"
_PLACE = f"{_LAUNCH}/test_kubernetes.py::test_what_the_place_says_is_compared"
_LATE = f"{_LAUNCH}/test_kubernetes.py::test_a_start_that_does_not_come_is_told_after_a_deadline"
_WAITS = f"{_LAUNCH}/test_kubernetes.py::test_what_a_pod_waits_for_is_in_its_events"
_FIELDS = f"{_LAUNCH}/test_kubernetes_fields.py"
_NOTEBOOK = f"{_LAUNCH}/test_notebook.py"
_STORAGE = "unit/service/test_storage_watch.py::test_a_worsening_is_told_once"
_DETECTOR = "unit/detect/test_detector.py"
_OOM = "unit/keeper/test_keeper_exits.py::test_out_of_memory"

TESTS: dict[str, dict[str, str]] = {
    "GEN1": {"prevented": _GATE},
    "GEN2": {"prevented": f"{_LAUNCH}/test_local.py::test_submit_starts_it_in_a_session_of_its_own",
             "diagnosed": f"{_VANISHED}::test_a_closed_terminal_is_in_the_journal"},
    "GEN3": {"prevented": _RSYNC},
    "GEN4": {"prevented": f"{_BOX}::test_scripts_from_another_system_are_mended"},
    "GEN5": {"detected": "platforms/test_box_survival.py::"
                         "test_an_environment_is_made_and_a_shell_that_talks_is_refused"},
    "GEN6": {"prevented": "platforms/test_box_survival.py::"
                          "test_cron_starts_a_job_again_after_a_reboot_and_only_then",
             "diagnosed": f"{_VANISHED}::test_another_boot_explains_everything"},
    "GEN7": {"prevented": f"{_BOX}::test_one_run_a_gpu"},
    "GEN8": {"prevented": _KILLED_ON_BOX},
    "SLURM1": {"prevented": "contract/test_run.py::test_sigterm_becomes_a_request_not_an_end"},
    "SLURM2": {"prevented": f"{_LAUNCH}/test_slurm.py::test_a_walltime_without_room_is_found"},
    "SLURM3": {"prevented": f"{_LAUNCH}/test_slurm_steps.py::test_a_step_asks_for_its_cores_again"},
    "SLURM4": {"diagnosed": f"{_LAUNCH}/test_slurm.py::test_states_of_every_step_are_read"},
    "SLURM5": {"prevented": _LINT},
    "K8S1": {"detected": _PLACE, "watched": _LATE},
    "K8S2": {"prevented": f"{_LAUNCH}/test_kubernetes.py::test_no_error_is_found_by_default"},
    "K8S3": {"watched": _LATE},
    "K8S4": {"prevented": f"{_LAUNCH}/test_kubernetes.py::test_what_cannot_train_is_an_error",
             "detected": _PLACE,
             "watched": _WAITS},
    "K8S5": {"prevented": f"{_FIELDS}::test_what_costs_work_is_a_warning"},
    "K8S6": {"prevented": f"{_LAUNCH}/test_pod.py::test_the_probe_says_what_is_missing"},
    "NB1": {"prevented": f"{_NOTEBOOK}::test_a_drive_that_loses_a_file_is_found_out"},
    "NB2": {"prevented": f"{_NOTEBOOK}::test_a_wrong_accelerator_ends_a_kaggle_session_and_keeps_"
                         "what_was_carried_over",
            "diagnosed": f"{_LAUNCH}/test_kaggle.py::test_how_it_ended_is_said_by_what_it_left"},
    "NB3": {"prevented": f"{_LAUNCH}/test_kaggle.py::test_what_kaggle_is_asked_for"},
    "NB4": {"prevented": f"{_NOTEBOOK}::test_traps_before_a_session_is_spent"},
    "NB5": {"prevented": f"{_NOTEBOOK}::test_a_sitting_warns_itself_before_the_ceiling"},
    "U3": {"diagnosed": f"{_VANISHED}::"
                        "test_what_is_left_is_a_kill_and_says_what_could_not_be_read"},
    "U6": {"watched": _STORAGE},
    "U7": {"watched": _STORAGE},
    "U9": {"diagnosed": _OOM},
    "U30": {"detected": f"{_LAUNCH}/test_kubernetes.py::"
                        "test_an_image_by_tag_is_told_of_and_none_is_refused"},
    "U34": {"prevented": _LINT},
    "U41": {"diagnosed": _OOM},
    "U46": {"detected": "unit/cli/test_checks.py::test_devices_and_default_threads_are_said",
            "watched": "unit/worker/test_elastic_survival.py::"
                       "test_a_group_of_more_ranks_than_gpus_is_told_once"},
    "MN3": {"watched": f"{_DETECTOR}::"
                       "test_a_stopped_rank_of_two_is_named_within_the_floor_and_one_step"},
}  # fmt: skip
