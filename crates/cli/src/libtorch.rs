//! Whether a program will find its libtorch.
//!
//! Without it, the dynamic loader ends the program with the name of a library or of a mangled symbol, before a line of
//! its own runs. This module looks for the library where the loader does, and says what is missing and what to do.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use elf::ElfStream;
use elf::abi::{DT_NEEDED, DT_RPATH, DT_RUNPATH};
use elf::endian::AnyEndian;

use crate::failure::Failure;

/// The version of libtorch that programs are built with: `./setup` installs it.
pub const VERSION: &str = "2.13.0";
/// The library of libtorch that a program needs.
const LIBRARY: &str = "libtorch_cpu.so";

/// What the header of a program says about its libraries.
#[derive(Default)]
struct Dynamic {
    needed: Vec<String>,
    search_dirs: Vec<PathBuf>,
}

/// Fails if the loader would not find libtorch for `program`, or another version of it. A program that cannot be read
/// passes: the loader knows better.
pub fn check(program: &Path) -> Result<(), Failure> {
    let Some(dynamic) = read_dynamic(program) else {
        return Ok(());
    };
    let library_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    check_in(program, &dynamic, &library_path)
}

fn check_in(program: &Path, dynamic: &Dynamic, library_path: &OsStr) -> Result<(), Failure> {
    if !dynamic.needed.iter().any(|name| name == LIBRARY) {
        return Ok(());
    }
    // The loader's order, but for its cache of system libraries, in which libtorch is never.
    let dirs = std::env::split_paths(library_path).chain(dynamic.search_dirs.iter().cloned());
    let Some(dir) = dirs.into_iter().find(|dir| dir.join(LIBRARY).exists()) else {
        let hint = format!(
            "install torch into the same environment with `pip install torch=={VERSION}`, set LD_LIBRARY_PATH to the lib \
             folder of a libtorch {VERSION}, or run ./setup in the clone and build again"
        );
        let searched = dynamic
            .search_dirs
            .iter()
            .map(|dir| dir.display().to_string());
        let searched = searched.collect::<Vec<_>>().join(", ");
        let missing = format!(
            "{} needs {LIBRARY}, which is neither in LD_LIBRARY_PATH nor in {searched}",
            program.display()
        );
        return Err(Failure::new(missing).hint(hint));
    };
    match version(&dir) {
        Some(found) if found != VERSION => Err(Failure::new(format!(
            "{} is built with libtorch {VERSION}, but {} has {found}",
            program.display(),
            dir.display()
        ))
        .hint(format!(
            "run `pip install torch=={VERSION}` in that environment, unset LD_LIBRARY_PATH, or run ./setup in the clone"
        ))),
        _ => Ok(()),
    }
}

/// `None` if the program is not an ELF file.
fn read_dynamic(program: &Path) -> Option<Dynamic> {
    let mut elf = ElfStream::<AnyEndian, _>::open_stream(File::open(program).ok()?).ok()?;
    let entries = elf.dynamic().ok()??;
    let entries: Vec<(i64, usize)> = entries
        .iter()
        .filter_map(|entry| Some((entry.d_tag, usize::try_from(entry.d_val()).ok()?)))
        .collect();
    let names = *elf.section_header_by_name(".dynstr").ok()??;
    let names = elf.section_data_as_strtab(&names).ok()?;
    let origin = program.canonicalize().ok()?.parent()?.to_owned();
    let mut dynamic = Dynamic::default();
    for (tag, at) in entries {
        match tag {
            DT_NEEDED => dynamic.needed.push(names.get(at).ok()?.to_owned()),
            DT_RPATH | DT_RUNPATH => {
                let dirs = names.get(at).ok()?;
                let dirs = dirs.replace("$ORIGIN", &origin.to_string_lossy());
                dynamic.search_dirs.extend(std::env::split_paths(&dirs));
            }
            _ => {}
        }
    }
    Some(dynamic)
}

/// The version of the libtorch whose libraries are in `dir`, without its build (`+cpu`); `None` if it does not say.
fn version(dir: &Path) -> Option<String> {
    let torch = dir.parent()?;
    let text = fs::read_to_string(torch.join("build-version"))
        .or_else(|_| fs::read_to_string(torch.join("version.py")))
        .ok()?;
    let line = text.lines().find(|line| {
        let is_version = line.starts_with("__version__");
        is_version || line.starts_with(|first: char| first.is_ascii_digit())
    })?;
    let number = line.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = number.find(|c: char| c != '.' && !c.is_ascii_digit());
    Some(number[..end.unwrap_or(number.len())].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libtorch(version_file: &str, content: &str) -> tempfile::TempDir {
        let torch = tempfile::tempdir().unwrap();
        fs::create_dir(torch.path().join("lib")).unwrap();
        fs::write(torch.path().join("lib").join(LIBRARY), "").unwrap();
        fs::write(torch.path().join(version_file), content).unwrap();
        torch
    }

    fn failure(dynamic: &Dynamic, library_path: &Path) -> Option<String> {
        let checked = check_in(Path::new("engine"), dynamic, library_path.as_os_str());
        checked.err().map(|failure| failure.to_string())
    }

    #[test]
    fn a_missing_and_a_wrong_libtorch_are_named() {
        let right = libtorch("version.py", "import os\n__version__ = '2.13.0+cu130'\n");
        let wrong = libtorch("build-version", "2.5.1+cpu\n");
        let mut dynamic = Dynamic {
            needed: vec![LIBRARY.into()],
            search_dirs: vec!["/nowhere/lib".into()],
        };
        let missing = failure(&dynamic, Path::new("")).unwrap();
        assert!(missing.contains("nor in /nowhere/lib"), "{missing}");
        dynamic.search_dirs.push(right.path().join("lib"));
        assert_eq!(failure(&dynamic, Path::new("")), None);
        let other = failure(&dynamic, &wrong.path().join("lib")).unwrap();
        assert!(other.contains("has 2.5.1"), "{other}");
    }

    #[test]
    fn the_header_of_this_program_is_read() {
        let dynamic = read_dynamic(&std::env::current_exe().unwrap()).unwrap();
        assert!(dynamic.needed.iter().any(|name| name.starts_with("libc.")));
        assert!(read_dynamic(Path::new("/etc/passwd")).is_none());
    }

    #[test]
    fn setup_installs_the_expected_version() {
        let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../setup");
        let setup = fs::read_to_string(setup).unwrap();
        assert!(setup.contains(&format!("torch_version={VERSION}\n")));
    }
}
