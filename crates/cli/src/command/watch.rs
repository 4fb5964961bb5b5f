//! `run --watch`: heartbeats of PyTorch scripts, without changes to the scripts.
//!
//! The ranks get a folder with a `sitecustomize.py` on their `PYTHONPATH`, which Python imports before it runs a script.
//! It is the package of the wheel, which this program carries with it, so that it also works where no wheel is installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use tempfile::TempDir;
use trainyard_launcher::Job;

const PYTHON_PATH: &str = "PYTHONPATH";
/// Turns the watch on in a process that finds it on its path.
const WATCH: &str = "TRAINYARD_WATCH";

macro_rules! files {
    ($($path:literal),+ $(,)?) => {
        [$(($path, include_str!(concat!("../../../../packaging/trainyard/python/trainyard/", $path)))),+]
    };
}

const FILES: [(&str, &str); 12] = files![
    "__init__.py",
    "watch/__init__.py",
    "watch/__main__.py",
    "watch/autostart/sitecustomize.py",
    "watch/clock.py",
    "watch/collectives.py",
    "watch/position.py",
    "watch/slot.py",
    "watch/steps.py",
    "watch/torch_import.py",
    "watch/worker.py",
    "watch/writer.py",
];

/// The folder with the package, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    _folder: TempDir,
}

impl Watch {
    /// Lets the ranks of a job import the package when they start.
    pub fn install(job: &mut Job) -> io::Result<Watch> {
        let folder = tempfile::Builder::new()
            .prefix("trainyard-watch-")
            .tempdir()?;
        let package = folder.path().join("trainyard");
        for (path, text) in FILES {
            let path = package.join(path);
            fs::create_dir_all(path.parent().unwrap_or(&package))?;
            fs::write(path, text)?;
        }
        let given = env::var_os(PYTHON_PATH);
        let path = python_path(&package.join("watch/autostart"), given)?;
        job.env.push((PYTHON_PATH.into(), path));
        job.env.push((WATCH.into(), "1".into()));
        Ok(Watch { _folder: folder })
    }
}

/// The path with another folder before those that are given.
fn python_path(first: &Path, given: Option<OsString>) -> io::Result<OsString> {
    let given = given.filter(|given| !given.is_empty()).unwrap_or_default();
    let others = env::split_paths(&given).filter(|_| !given.is_empty());
    let all = std::iter::once(first.to_owned()).chain(others);
    env::join_paths(all).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn all_files_of_the_package_are_carried() -> io::Result<()> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../packaging/trainyard/python/trainyard");
        let mut found = BTreeSet::new();
        for folder in ["watch", "watch/autostart"] {
            for entry in fs::read_dir(source.join(folder))?.flatten() {
                let path = Path::new(folder).join(entry.file_name());
                if path.extension().is_some_and(|extension| extension == "py") {
                    found.insert(path);
                }
            }
        }
        let carried = FILES.iter().map(|(path, _)| PathBuf::from(path));
        let of_watch: BTreeSet<PathBuf> =
            carried.filter(|path| path.starts_with("watch")).collect();
        assert_eq!(of_watch, found);
        Ok(())
    }

    #[test]
    fn the_path_of_the_user_stays() -> io::Result<()> {
        let path = |given: Option<&str>| python_path(Path::new("/w"), given.map(OsString::from));
        assert_eq!(path(None)?, "/w");
        assert_eq!(path(Some(""))?, "/w");
        assert_eq!(path(Some("/a:/b"))?, "/w:/a:/b");
        Ok(())
    }

    #[test]
    fn ranks_find_the_package_while_the_job_runs() -> io::Result<()> {
        let mut job = Job::new("python3", 1);
        let watch = Watch::install(&mut job)?;
        let path = job.env.iter().find(|(name, _)| name == PYTHON_PATH);
        let path = path.map(|(_, path)| path.clone()).unwrap_or_default();
        let first = env::split_paths(&path).next().unwrap_or_default();
        assert!(first.join("sitecustomize.py").is_file());
        drop(watch);
        assert!(!first.exists());
        Ok(())
    }
}
