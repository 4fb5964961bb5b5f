//! Experts shared by real ranks, against the same job on one.

mod balance;
mod bytes;
mod chance;
mod dry_run;
mod endurance;
mod equality;
mod job;

use std::process::ExitCode;

use trainyard_conformance::{Case, Suite};

const REPLICATED: &[Case] = &[
    Case {
        name: "experts_on_different_ranks_equal_one_rank",
        run: equality::experts,
    },
    Case {
        name: "tokens_that_go_to_machines_first_equal_one_rank",
        run: equality::machines,
    },
    Case {
        name: "tokens_go_to_a_machine_once",
        run: bytes::machines,
    },
    Case {
        name: "families_of_routers_equal_one_rank",
        run: equality::families,
    },
    Case {
        name: "unequal_loads_and_empty_experts_equal_one_rank",
        run: equality::skewed,
    },
    Case {
        name: "dropped_tokens_equal_one_rank",
        run: equality::dropped,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: equality::fp32,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: equality::recomputation,
    },
    Case {
        name: "tokens_there_and_back_are_what_the_ledger_counts",
        run: bytes::tokens,
    },
];

const SHARDED: &[Case] = &[
    Case {
        name: "sharded_states_equal_one_rank",
        run: equality::sharded,
    },
    Case {
        name: "gradients_and_parameters_are_those_of_the_closed_form",
        run: bytes::states,
    },
];

const MIXED: &[Case] = &[
    Case {
        name: "tensor_parallel_equals_one_rank",
        run: equality::tensor,
    },
    Case {
        name: "context_parallel_equals_one_rank",
        run: equality::context,
    },
    Case {
        name: "pipelines_equal_one_rank",
        run: equality::pipeline,
    },
];

const ALL_AT_ONCE: &[Case] = &[Case {
    name: "several_axes_equal_one_rank",
    run: equality::several_axes,
}];

const DRY_RUN: &[Case] = &[
    Case {
        name: "a_dry_run_counts_what_a_real_one_does",
        run: dry_run::equals_a_real_run,
    },
    Case {
        name: "a_671b_class_model_on_2048_ranks",
        run: dry_run::large,
    },
];

const OVER_TIME: &[Case] = &[
    Case {
        name: "a_bias_balances_skewed_data_within_200_steps",
        run: balance::by_bias,
    },
    Case {
        name: "a_thousand_steps_of_random_routes_and_stalls_leave_nothing_behind",
        run: endurance::thousand_steps,
    },
];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "experts",
            sizes: &[2, 4],
            cases: REPLICATED,
        },
        Suite {
            name: "sharded",
            sizes: &[2, 4],
            cases: SHARDED,
        },
        Suite {
            name: "mixed",
            sizes: &[4],
            cases: MIXED,
        },
        Suite {
            name: "dry_run",
            sizes: &[2],
            cases: DRY_RUN,
        },
        Suite {
            name: "over_time",
            sizes: &[2, 4],
            cases: OVER_TIME,
        },
        Suite {
            name: "all_at_once",
            sizes: &[8],
            cases: ALL_AT_ONCE,
        },
    ])
}
