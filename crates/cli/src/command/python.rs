//! Which Python runs a script, and how it is called.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// How the program of a job is executed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProgramKind {
    /// As it is.
    Executable,
    /// By Python.
    Script,
    /// By Python, which looks for the module of that name.
    Module,
}

impl ProgramKind {
    /// What a program is that no option says more about: a script if it is named like one, or if Python can run it and the
    /// kernel cannot.
    pub fn guess(program: &Path) -> ProgramKind {
        let is_named_script = program
            .extension()
            .is_some_and(|extension| extension == "py");
        let is_archive = program.join("__main__.py").is_file();
        if is_named_script || is_archive || is_plain_file(program) {
            ProgramKind::Script
        } else {
            ProgramKind::Executable
        }
    }

    /// What comes before the program and its arguments.
    pub fn command_prefix(self) -> Vec<OsString> {
        let unbuffered = || vec![interpreter(), "-u".into()];
        match self {
            ProgramKind::Executable => Vec::new(),
            ProgramKind::Script => unbuffered(),
            ProgramKind::Module => [unbuffered(), vec!["-m".into()]].concat(),
        }
    }
}

/// Whether a path names a file that cannot be executed. Names without a directory are looked up on PATH instead.
fn is_plain_file(program: &Path) -> bool {
    let has_directory = program
        .parent()
        .is_some_and(|parent| parent != Path::new(""));
    let metadata = program.metadata();
    has_directory
        && metadata.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 == 0)
}

/// `PYTHON_EXEC` as in torchrun, or the Python of the environment that this program is installed in, or else that of
/// `PATH`.
fn interpreter() -> OsString {
    let given = env::var_os("PYTHON_EXEC").filter(|given| !given.is_empty());
    let beside = || beside(&env::current_exe().ok()?).map(PathBuf::into_os_string);
    given.or_else(beside).unwrap_or_else(|| "python3".into())
}

/// The Python of the virtual environment whose programs a program is among.
fn beside(program: &Path) -> Option<PathBuf> {
    let programs = program.parent()?;
    let is_environment = programs.parent()?.join("pyvenv.cfg").is_file();
    let python = programs.join("python3");
    (is_environment && python.exists()).then_some(python)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;

    use super::*;

    #[test]
    fn what_the_kernel_cannot_execute_is_a_script() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let (plain, program) = (dir.path().join("train"), dir.path().join("run"));
        fs::write(&plain, "print(1)")?;
        fs::write(&program, "#!/bin/sh")?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(dir.path().join("package"))?;
        fs::write(dir.path().join("package/__main__.py"), "")?;
        assert_eq!(
            ProgramKind::guess(Path::new("train.py")),
            ProgramKind::Script
        );
        assert_eq!(ProgramKind::guess(&plain), ProgramKind::Script);
        assert_eq!(
            ProgramKind::guess(&dir.path().join("package")),
            ProgramKind::Script
        );
        assert_eq!(ProgramKind::guess(&program), ProgramKind::Executable);
        assert_eq!(
            ProgramKind::guess(Path::new("trainyard")),
            ProgramKind::Executable
        );
        assert_eq!(
            ProgramKind::guess(&dir.path().join("missing")),
            ProgramKind::Executable
        );
        Ok(())
    }

    #[test]
    fn an_environment_that_is_not_activated_has_its_own_python() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let programs = dir.path().join("bin");
        fs::create_dir(&programs)?;
        fs::write(programs.join("python3"), "")?;
        assert_eq!(beside(&programs.join("trainyard")), None);
        fs::write(dir.path().join("pyvenv.cfg"), "")?;
        assert_eq!(
            beside(&programs.join("trainyard")),
            Some(programs.join("python3"))
        );
        Ok(())
    }
}
