//! A state saved by some ranks and loaded by others.

mod again;
mod hugging_face;
mod meshes;

use std::process::ExitCode;

use trainyard_conformance::{Case, Suite};

const MESHES: &[Case] = &[Case {
    name: "what_any_mesh_saves_any_other_loads_and_goes_on_with",
    run: meshes::any_to_any,
}];

const EXPERTS: &[Case] = &[Case {
    name: "experts_of_any_mesh_are_loaded_by_any_other",
    run: meshes::experts,
}];

const AGAIN: &[Case] = &[Case {
    name: "a_step_that_is_saved_again_is_whole",
    run: again::is_whole,
}];

const HUGGING_FACE: &[Case] = &[Case {
    name: "transformers_models_are_read_and_written_back",
    run: hugging_face::there_and_back,
}];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "meshes",
            sizes: &[8],
            cases: MESHES,
        },
        Suite {
            name: "experts",
            sizes: &[8],
            cases: EXPERTS,
        },
        Suite {
            name: "again",
            sizes: &[2],
            cases: AGAIN,
        },
        Suite {
            name: "hugging_face",
            sizes: &[2],
            cases: HUGGING_FACE,
        },
    ])
}
