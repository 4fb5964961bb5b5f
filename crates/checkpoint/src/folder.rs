//! What lies in a folder of checkpoints, told by its names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{CheckpointError, FILES, Result};

const STEP: &str = "step-";

/// What a leftover was going to be.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Leftover {
    /// A checkpoint that was being written.
    Partial,
    /// A checkpoint that was being deleted.
    Discarded,
}

impl Leftover {
    fn suffix(self) -> &'static str {
        match self {
            Leftover::Partial => ".partial",
            Leftover::Discarded => ".discarded",
        }
    }
}

/// What a name in the folder stands for.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Entry {
    Step(u64),
    Leftover(Leftover),
}

/// The newest complete checkpoint in `folder`; leftovers of broken writes are passed over, with a
/// warning that names them. A folder that does not exist has none.
pub fn latest(folder: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let folder = folder.as_ref();
    for path in leftovers(folder)? {
        tracing::warn!(
            "{} is left from an interrupted write and is ignored",
            path.display()
        );
    }
    let newest = steps(folder)?.into_iter().max();
    Ok(newest.map(|step| step_path(folder, step)))
}

/// Folders that an interrupted write, or an interrupted deletion, left in `folder`.
pub fn leftovers(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let folder = folder.as_ref();
    let unfinished = entries(folder)?
        .into_iter()
        .filter(|(path, entry)| matches!(entry, Entry::Leftover(_)) || !is_complete(path));
    let mut paths: Vec<PathBuf> = unfinished.map(|(path, _)| path).collect();
    paths.sort();
    Ok(paths)
}

/// The steps of all complete checkpoints in `folder`.
pub(crate) fn steps(folder: &Path) -> Result<Vec<u64>> {
    let complete = entries(folder)?
        .into_iter()
        .filter_map(|(path, entry)| match entry {
            Entry::Step(step) if is_complete(&path) => Some(step),
            _ => None,
        });
    Ok(complete.collect())
}

/// The place of a step's checkpoint.
pub(crate) fn step_path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{STEP}{step}"))
}

/// The place of a step's checkpoint while it is none.
pub(crate) fn leftover_path(folder: &Path, step: u64, leftover: Leftover) -> PathBuf {
    folder.join(format!("{STEP}{step}{}", leftover.suffix()))
}

fn is_complete(path: &Path) -> bool {
    FILES.iter().all(|file| path.join(file).is_file())
}

fn entries(folder: &Path) -> Result<Vec<(PathBuf, Entry)>> {
    let listing = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listing => listing.map_err(CheckpointError::io(folder))?,
    };
    let mut known = Vec::new();
    for item in listing {
        let item = item.map_err(CheckpointError::io(folder))?;
        let entry = item.file_name().to_str().and_then(parse);
        known.extend(entry.map(|entry| (item.path(), entry)));
    }
    Ok(known)
}

/// Reads a name; other people's files are nothing to us.
fn parse(name: &str) -> Option<Entry> {
    let rest = name.strip_prefix(STEP)?;
    let leftover = [Leftover::Partial, Leftover::Discarded]
        .into_iter()
        .find_map(|kind| Some((kind, rest.strip_suffix(kind.suffix())?)));
    match leftover {
        Some((kind, number)) => number.parse::<u64>().ok().map(|_| Entry::Leftover(kind)),
        // `step-007` and `step-+7` were not written by us.
        None => rest
            .parse::<u64>()
            .ok()
            .filter(|step| step.to_string() == rest)
            .map(Entry::Step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_strictly() {
        assert_eq!(parse("step-0"), Some(Entry::Step(0)));
        assert_eq!(parse("step-1200"), Some(Entry::Step(1200)));
        assert_eq!(
            parse("step-12.partial"),
            Some(Entry::Leftover(Leftover::Partial))
        );
        assert_eq!(
            parse("step-12.discarded"),
            Some(Entry::Leftover(Leftover::Discarded))
        );
        for other in ["step-", "step-007", "step-+7", "step-x.partial", "12", "tb"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_has_no_checkpoint() {
        let parent = tempfile::tempdir().unwrap();
        assert_eq!(latest(parent.path().join("none")).unwrap(), None);
    }

    proptest::proptest! {
        #[test]
        fn places_are_read_back(step: u64) {
            let name = |path: PathBuf| path.to_str().unwrap().to_owned();
            let folder = Path::new("");
            proptest::prop_assert_eq!(parse(&name(step_path(folder, step))), Some(Entry::Step(step)));
            let partial = leftover_path(folder, step, Leftover::Partial);
            proptest::prop_assert_eq!(parse(&name(partial)), Some(Entry::Leftover(Leftover::Partial)));
        }
    }
}
