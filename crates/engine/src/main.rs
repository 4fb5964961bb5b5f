//! `trainyard-engine`: the commands that need libtorch, with the components of Trainyard.

use std::process::ExitCode;

use trainyard_train::Registry;

fn main() -> ExitCode {
    trainyard_engine::main(Registry::builtin())
}
