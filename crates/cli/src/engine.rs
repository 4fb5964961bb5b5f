//! Commands that need tensors: this process becomes `trainyard-engine`, with the same arguments.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use trainyard_launcher::{color, find_program, openmp};

use crate::failure::Failure;
use crate::libtorch;

const NAME: &str = "trainyard-engine";

/// The Python package that contains the engine, beside that of torch.
const PYTHON_PACKAGE: &str = "trainyard_engine";

/// The environment variable with the path of the engine.
const VARIABLE: &str = "TRAINYARD_ENGINE";

/// Whether the user has named an engine, which may be a program of their own.
pub fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Replaces this process by the engine; returns only on failure.
pub fn hand_over() -> Failure {
    hand_over_with(&[])
}

/// The same with further arguments.
pub fn hand_over_with(more: &[String]) -> Failure {
    hand_over_in(Vec::new(), more)
}

/// The same with further variables of the environment.
pub fn hand_over_in(environment: Vec<(&str, OsString)>, more: &[String]) -> Failure {
    let more = more.iter().map(OsString::from);
    become_engine(environment, std::env::args_os().skip(1).chain(more))
}

/// Replaces this process by the engine with other arguments; returns only on failure.
pub fn hand_over_as(arguments: impl IntoIterator<Item = OsString>) -> Failure {
    become_engine(Vec::new(), arguments)
}

fn become_engine(
    environment: Vec<(&str, OsString)>,
    arguments: impl IntoIterator<Item = OsString>,
) -> Failure {
    let engine = match program() {
        Ok(engine) => engine,
        Err(failure) => return failure,
    };
    let error = Command::new(&engine)
        .args(arguments)
        .envs(color::environment())
        .envs(openmp::environment(|name| std::env::var_os(name).is_some()))
        .envs(environment)
        .exec();
    Failure::new(format!("cannot start {}: {error}", engine.display())).hint(format!(
        "build it with `cargo build --release`, or set {VARIABLE} to the path of another one"
    ))
}

/// The output of the engine for these arguments, with further variables of the environment, or its error. Fails if
/// there is no engine.
pub fn ask(
    environment: Vec<(&str, OsString)>,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Result<Vec<u8>, String>, Failure> {
    let output = Command::new(program()?)
        .args(arguments)
        .envs(environment)
        .output();
    let output = output.map_err(Failure::new)?;
    Ok(if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    })
}

/// The path of the engine. Fails if there is none, or if it would not find its libtorch.
pub fn program() -> Result<PathBuf, Failure> {
    let named = std::env::var_os(VARIABLE);
    let beside = std::env::current_exe().ok();
    let search_path = std::env::var_os("PATH");
    let program = find(named.as_deref(), beside.as_deref(), search_path.as_deref())?;
    libtorch::check(&program)?;
    Ok(program)
}

/// The engine of the environment variable, else the one in the directory of this program, else the one of the Python
/// environment to which this program belongs, else the first on `PATH`.
fn find(
    named: Option<&OsStr>,
    current_exe: Option<&Path>,
    search_path: Option<&OsStr>,
) -> Result<PathBuf, Failure> {
    if let Some(named) = named {
        return find_program(Path::new(named), search_path).ok_or_else(|| {
            Failure::new(format!(
                "{VARIABLE}={} is not an executable file",
                named.display()
            ))
            .hint(format!("unset {VARIABLE}, or set it to the path of {NAME}"))
        });
    }
    let beside = current_exe.map(|exe| exe.with_file_name(NAME));
    beside
        .and_then(|beside| find_program(&beside, None))
        .or_else(|| in_python_environment(current_exe?))
        .or_else(|| find_program(Path::new(NAME), search_path))
        .ok_or_else(|| {
            let beside = current_exe.and_then(Path::parent).unwrap_or(Path::new("."));
            Failure::new(format!(
                "`{NAME}` is neither in {} nor on PATH",
                beside.display()
            ))
            .hint(format!(
                "install it with `pip install trainyard[engine]`, build it with `cargo build --release`, or set \
                 {VARIABLE} to its path"
            ))
        })
}

/// Where `pip` installs the engine if it has installed this program in `bin`.
fn in_python_environment(current_exe: &Path) -> Option<PathBuf> {
    let prefix = current_exe.parent()?.parent()?;
    let pythons = ["lib", "lib64"]
        .into_iter()
        .flat_map(|lib| prefix.join(lib).read_dir());
    let packages = pythons.flatten().flatten().flat_map(|python| {
        // Debian's own Python has `dist-packages`.
        ["site-packages", "dist-packages"].map(|packages| python.path().join(packages))
    });
    let mut engines = packages.map(|packages| packages.join(PYTHON_PACKAGE).join(NAME));
    engines.find_map(|engine| find_program(&engine, None))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    fn folder_with(program: &str) -> TempDir {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join(program);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        folder
    }

    #[test]
    fn named_goes_before_beside_and_beside_before_path() {
        let (mine, beside, on_path) = (folder_with("mine"), folder_with(NAME), folder_with(NAME));
        let named = mine.path().join("mine");
        let exe = beside.path().join("trainyard");
        let elsewhere = mine.path().join("trainyard");
        let search = Some(on_path.path().as_os_str());
        let found = |named, exe: &Path| find(named, Some(exe), search).unwrap();

        assert_eq!(found(Some(named.as_os_str()), &exe), named);
        assert_eq!(found(None, &exe), beside.path().join(NAME));
        assert_eq!(found(None, &elsewhere), on_path.path().join(NAME));
    }

    #[test]
    fn the_engine_of_the_same_python_environment_is_found() {
        let installed = "lib/python3.12/site-packages/trainyard_engine/trainyard-engine";
        let environment = folder_with(installed);
        let exe = environment.path().join("bin/trainyard");
        assert_eq!(
            find(None, Some(&exe), None).unwrap(),
            environment.path().join(installed)
        );
    }

    #[test]
    fn a_missing_engine_is_explained() {
        let failure = find(None, Some(Path::new("/nowhere/trainyard")), None).unwrap_err();
        let text = failure.to_string();
        assert!(text.starts_with("error: `trainyard-engine` is neither in /nowhere nor on PATH"));
        assert!(text.contains("\nhint: "));
        let failure = find(Some(OsStr::new("/no/engine")), None, None).unwrap_err();
        assert!(failure.to_string().contains("TRAINYARD_ENGINE=/no/engine"));
    }
}
