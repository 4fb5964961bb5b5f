//! Finds a program before N processes fail to execute it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The executable file that `name` refers to: `name` itself if it has a slash, else the first match in the
/// directories of `search_path` (the value of `PATH`).
pub fn find_program(name: &Path, search_path: Option<&OsStr>) -> Option<PathBuf> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        return is_executable(name).then(|| name.to_owned());
    }
    std::env::split_paths(search_path?)
        .map(|dir| dir.join(name))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_name_is_searched_on_path_and_a_path_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        let search = Some(dir.path().as_os_str());

        assert_eq!(find_program(Path::new("program"), search), None);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(
            find_program(Path::new("program"), search),
            Some(program.clone())
        );
        assert_eq!(find_program(&program, None), Some(program));
        assert_eq!(find_program(Path::new("./program"), search), None);
        assert_eq!(find_program(Path::new("other"), search), None);
        assert_eq!(find_program(Path::new("program"), None), None);
    }
}
