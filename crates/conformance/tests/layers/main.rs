//! Layers and sequences shared by real ranks, against the same job on one.

mod bytes;
mod context;
mod documents;
mod dropout;
mod equality;
mod gpt2;
mod memory;
mod mixed;
mod pipeline;
mod pipeline_overlap;
mod tensor;

use std::process::ExitCode;

use trainyard_conformance::{Case, Suite};

const TENSOR: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: tensor::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: tensor::fp32,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: tensor::bf16,
    },
    Case {
        name: "tied_embeddings_equal_one_rank",
        run: tensor::tied,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: tensor::recomputation,
    },
    Case {
        name: "dropout_leaves_out_what_one_rank_would",
        run: dropout::equal,
    },
    Case {
        name: "recomputation_leaves_out_the_same",
        run: dropout::recomputation,
    },
    Case {
        name: "weights_from_a_file_equal_one_rank",
        run: tensor::from_file,
    },
    Case {
        name: "evaluation_equals_one_rank",
        run: tensor::evaluation,
    },
    Case {
        name: "bytes_of_a_block_are_four_sums_of_its_positions",
        run: bytes::tensor,
    },
    Case {
        name: "activations_are_those_of_the_closed_form",
        run: memory::activations,
    },
];

const CONTEXT: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: context::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: context::fp32,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: context::bf16,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: context::recomputation,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: bytes::context,
    },
];

const MIXED: &[Case] = &[
    Case {
        name: "tensor_and_data_parallel_equal_one_rank",
        run: mixed::replicated,
    },
    Case {
        name: "tensor_parallel_and_sharded_states_equal_one_rank",
        run: mixed::sharded,
    },
    Case {
        name: "tensor_parallel_and_hybrid_sharding_equal_one_rank",
        run: mixed::hybrid,
    },
    Case {
        name: "tensor_context_and_sharded_states_equal_one_rank",
        run: mixed::context,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: mixed::bytes,
    },
];

const GPT2: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: gpt2::fp64,
    },
    Case {
        name: "bf16_is_close_to_one_rank",
        run: gpt2::bf16,
    },
    Case {
        name: "pipelines_equal_one_rank",
        run: gpt2::pipelines,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: gpt2::recomputation,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: gpt2::bytes,
    },
];

const DOCUMENTS: &[Case] = &[
    Case {
        name: "documents_kept_apart_equal_one_rank",
        run: documents::equal,
    },
    Case {
        name: "documents_kept_apart_make_a_difference",
        run: documents::make_a_difference,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: documents::recomputation,
    },
];

const PIPELINE: &[Case] = &[
    Case {
        name: "every_schedule_equals_one_rank",
        run: pipeline::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: pipeline::fp32,
    },
    Case {
        name: "tied_embeddings_equal_one_rank",
        run: pipeline::tied,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: pipeline::bytes,
    },
];

const PIPELINE_OF_TWO: &[Case] = &[Case {
    name: "as_many_micro_batches_are_held_as_the_schedule_says",
    run: memory::in_flight,
}];

const PIPELINE_WITH_ONE_AXIS: &[Case] = &[
    Case {
        name: "pipelines_with_another_axis_equal_one_rank",
        run: pipeline::with_one_axis,
    },
    Case {
        name: "pipelines_of_sharded_stages_equal_one_rank",
        run: pipeline::with_sharding,
    },
    Case {
        name: "bytes_of_sharded_stages_are_those_of_the_closed_form",
        run: pipeline::bytes_with_sharding,
    },
    Case {
        name: "gradients_travel_during_the_cooldown",
        run: pipeline_overlap::reduction_during_cooldown,
    },
    Case {
        name: "a_pair_communicates_in_turn",
        run: pipeline_overlap::pairs_communicate_in_turn,
    },
];

const PIPELINE_WITH_TWO_AXES: &[Case] = &[Case {
    name: "pipelines_with_two_axes_equal_one_rank",
    run: pipeline::with_two_axes,
}];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "tensor",
            sizes: &[2, 4],
            cases: TENSOR,
        },
        Suite {
            name: "context",
            sizes: &[2, 4],
            cases: CONTEXT,
        },
        Suite {
            name: "gpt2",
            sizes: &[2, 4],
            cases: GPT2,
        },
        Suite {
            name: "documents",
            sizes: &[2],
            cases: DOCUMENTS,
        },
        Suite {
            name: "pipeline",
            sizes: &[2, 4],
            cases: PIPELINE,
        },
        Suite {
            name: "pipeline_of_two",
            sizes: &[2],
            cases: PIPELINE_OF_TWO,
        },
        Suite {
            name: "pipeline_with_one_axis",
            sizes: &[4],
            cases: PIPELINE_WITH_ONE_AXIS,
        },
        Suite {
            name: "pipeline_with_two_axes",
            sizes: &[8],
            cases: PIPELINE_WITH_TWO_AXES,
        },
        Suite {
            name: "mixed",
            sizes: &[8],
            cases: MIXED,
        },
    ])
}
