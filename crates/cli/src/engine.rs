//! The hand-off: what needs tensors becomes `trainyard-engine`, with all arguments as they are.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use trainyard_elastic::find_program;

use crate::failure::Failure;

const NAME: &str = "trainyard-engine";

/// Names the engine where it is neither beside this program nor on `PATH`.
const VARIABLE: &str = "TRAINYARD_ENGINE";

/// Turns this process into the engine; returns only when that fails.
pub fn hand_over() -> Failure {
    hand_over_with(&[])
}

/// The same with more arguments after its own.
pub fn hand_over_with(more: &[String]) -> Failure {
    let engine = match program() {
        Ok(engine) => engine,
        Err(failure) => return failure,
    };
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let error = Command::new(&engine).args(args).args(more).exec();
    Failure::new(format!("cannot start {}: {error}", engine.display())).hint(format!(
        "build it with `cargo build --release`, or name another in {VARIABLE}"
    ))
}

/// What the engine prints when it is asked this, or else what it says is wrong. Fails where there is no engine.
pub fn ask(
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Result<Vec<u8>, String>, Failure> {
    let output = Command::new(program()?).args(arguments).output();
    let output = output.map_err(Failure::new)?;
    Ok(match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    })
}

/// The engine.
pub fn program() -> Result<PathBuf, Failure> {
    let named = std::env::var_os(VARIABLE);
    let beside = std::env::current_exe().ok();
    let search_path = std::env::var_os("PATH");
    find(named.as_deref(), beside.as_deref(), search_path.as_deref())
}

/// The engine that was named, else the one beside this program, else the first on `PATH`.
fn find(
    named: Option<&OsStr>,
    current_exe: Option<&Path>,
    search_path: Option<&OsStr>,
) -> Result<PathBuf, Failure> {
    if let Some(named) = named {
        return find_program(Path::new(named), search_path).ok_or_else(|| {
            Failure::new(format!("{VARIABLE}={} is no program", named.display()))
                .hint(format!("unset {VARIABLE}, or set it to the path of {NAME}"))
        });
    }
    let beside = current_exe.map(|exe| exe.with_file_name(NAME));
    beside
        .and_then(|beside| find_program(&beside, None))
        .or_else(|| find_program(Path::new(NAME), search_path))
        .ok_or_else(|| {
            let beside = current_exe.and_then(Path::parent).unwrap_or(Path::new("."));
            Failure::new(format!(
                "`{NAME}` is neither in {} nor on PATH",
                beside.display()
            ))
            .hint(format!(
                "build it with `cargo build --release`, or name it in {VARIABLE}"
            ))
        })
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
    fn a_missing_engine_is_explained() {
        let failure = find(None, Some(Path::new("/nowhere/trainyard")), None).unwrap_err();
        let text = failure.to_string();
        assert!(text.starts_with("error: `trainyard-engine` is neither in /nowhere nor on PATH"));
        assert!(text.contains("\nhint: "));
        let failure = find(Some(OsStr::new("/no/engine")), None, None).unwrap_err();
        assert!(failure.to_string().contains("TRAINYARD_ENGINE=/no/engine"));
    }
}
