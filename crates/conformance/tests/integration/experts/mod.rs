//! Expert parallelism on real ranks, compared with one rank.

mod any_module;
mod balance;
mod bytes;
mod chance;
mod dry_run;
mod endurance;
mod equality;
mod job;

use trainyard_conformance::{Case, Suite};

const REPLICATED: &[Case] = &[
    Case {
        name: "experts_on_different_ranks_equal_one_rank",
        run: equality::experts,
    },
    Case {
        name: "hierarchical_dispatch_equals_one_rank",
        run: equality::machines,
    },
    Case {
        name: "a_token_is_sent_to_a_node_once",
        run: bytes::machines,
    },
    Case {
        name: "all_kinds_of_routers_equal_one_rank",
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
        name: "recomputation_is_bit_identical",
        run: equality::recomputation,
    },
    Case {
        name: "dispatch_and_combine_equal_the_closed_form",
        run: bytes::tokens,
    },
];

const SHARDED: &[Case] = &[
    Case {
        name: "experts_of_any_module_equal_one_rank",
        run: any_module::equal_one_rank,
    },
    Case {
        name: "whole_experts_in_a_sharded_model_equal_one_rank",
        run: equality::whole_experts,
    },
    Case {
        name: "offloaded_experts_are_bit_identical",
        run: equality::offloaded,
    },
    Case {
        name: "sharded_states_equal_one_rank",
        run: equality::sharded,
    },
    Case {
        name: "bytes_of_gradients_and_parameters_equal_the_closed_form",
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
        name: "a_dry_run_equals_a_real_run",
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
        name: "a_thousand_steps_of_random_routing_and_stalls_do_not_leak",
        run: endurance::thousand_steps,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "experts::experts",
        sizes: &[2],
        full_sizes: &[4],
        cases: REPLICATED,
        also_over_network: false,
    },
    Suite {
        name: "experts::sharded",
        sizes: &[2],
        full_sizes: &[4],
        cases: SHARDED,
        also_over_network: false,
    },
    Suite {
        name: "experts::mixed",
        sizes: &[4],
        full_sizes: &[],
        cases: MIXED,
        also_over_network: false,
    },
    Suite {
        name: "experts::dry_run",
        sizes: &[2],
        full_sizes: &[],
        cases: DRY_RUN,
        also_over_network: false,
    },
    Suite {
        name: "experts::over_time",
        sizes: &[],
        full_sizes: &[2, 4],
        cases: OVER_TIME,
        also_over_network: false,
    },
    Suite {
        name: "experts::all_at_once",
        sizes: &[8],
        full_sizes: &[],
        cases: ALL_AT_ONCE,
        also_over_network: false,
    },
];
