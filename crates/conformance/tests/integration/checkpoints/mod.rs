//! Checkpoints that some ranks save and others load.

mod again;
mod hugging_face;
mod meshes;

pub use meshes::shared_folder;
use trainyard_conformance::{Case, Suite};

const MESHES: &[Case] = &[Case {
    name: "checkpoints_of_any_mesh_load_on_any_other",
    run: meshes::any_to_any,
}];

const EXPERTS: &[Case] = &[Case {
    name: "checkpoints_with_experts_load_on_any_mesh",
    run: meshes::experts,
}];

const GRADIENT_ERRORS: &[Case] = &[Case {
    name: "gradient_errors_load_on_another_number_of_ranks",
    run: meshes::gradient_errors,
}];

const LOCAL_UPDATES: &[Case] = &[Case {
    name: "replicas_with_steps_of_their_own_load_as_another_number_of_replicas",
    run: meshes::local_updates,
}];

const AGAIN: &[Case] = &[Case {
    name: "a_step_that_is_saved_twice_is_complete",
    run: again::is_whole,
}];

const HUGGING_FACE: &[Case] = &[Case {
    name: "hugging_face_models_are_read_and_written_back",
    run: hugging_face::there_and_back,
}];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "checkpoints::local_updates",
        sizes: &[4],
        full_sizes: &[],
        cases: LOCAL_UPDATES,
        also_over_network: false,
    },
    Suite {
        name: "checkpoints::compression",
        sizes: &[4],
        full_sizes: &[],
        cases: GRADIENT_ERRORS,
        also_over_network: false,
    },
    Suite {
        name: "checkpoints::meshes",
        sizes: &[8],
        full_sizes: &[],
        cases: MESHES,
        also_over_network: false,
    },
    Suite {
        name: "checkpoints::experts",
        sizes: &[8],
        full_sizes: &[],
        cases: EXPERTS,
        also_over_network: false,
    },
    Suite {
        name: "checkpoints::again",
        sizes: &[2],
        full_sizes: &[],
        cases: AGAIN,
        also_over_network: false,
    },
    Suite {
        name: "checkpoints::hugging_face",
        sizes: &[2],
        full_sizes: &[],
        cases: HUGGING_FACE,
        also_over_network: false,
    },
];
