//! Reading the trace files of all formats. The content of a file decides about its format, not its name.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use serde::{Deserialize, de::IgnoredAny};

use crate::{
    Events, FlightRecorder, TraceError,
    chrome::read_chrome_text,
    pytorch::{PytorchError, is_pickle, may_be_trace, profiler, trailing_rank},
};

/// Traces compress to a tenth. A file that claims more than this is not one, and must not fill the memory.
const MAX_COMPRESSION: u64 = 200;

/// What a trace file has.
pub(crate) enum TraceFile {
    /// Events of one or several ranks.
    Events(Vec<Events>),
    /// A Flight Recorder dump of one rank.
    Dump(FlightRecorder),
}

/// The format of a file.
enum Format {
    Trainyard,
    Profiler,
    FlightRecorder,
}

/// Reads a file of any format.
pub(crate) fn read_trace_file(path: &Path) -> Result<TraceFile, TraceError> {
    let bytes = read_bytes(path)?;
    let format = Format::of(&bytes).map_err(|source| TraceError::UnknownFormat {
        path: path.to_owned(),
        source,
    })?;
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let pytorch = |source: PytorchError| TraceError::Pytorch {
        path: path.to_owned(),
        source,
    };
    match format {
        Format::Trainyard => read_chrome_text(path, &bytes).map(TraceFile::Events),
        Format::Profiler => profiler::parse(&bytes, rank_of_profile(name))
            .map(|events| TraceFile::Events(vec![events]))
            .map_err(pytorch),
        Format::FlightRecorder => FlightRecorder::parse(&bytes, trailing_rank(name))
            .map(TraceFile::Dump)
            .map_err(pytorch),
    }
}

/// The number at the end of such a name is the time.
fn rank_of_profile(name: &str) -> Option<usize> {
    trailing_rank(name).filter(|_| !name.contains(".pt.trace.json"))
}

impl Format {
    fn of(bytes: &[u8]) -> Result<Format, Option<serde_json::Error>> {
        if is_pickle(bytes) {
            return Ok(Format::FlightRecorder);
        }
        let keys: Keys = serde_json::from_slice(bytes)?;
        match keys {
            Keys {
                pg_config: Some(_), ..
            } => Ok(Format::FlightRecorder),
            Keys {
                trace_events: Some(_),
                schema_version: Some(_),
                ..
            } => Ok(Format::Profiler),
            Keys {
                trace_events: Some(_),
                ..
            } => Ok(Format::Trainyard),
            _ => Err(None),
        }
    }
}

/// The keys by which formats differ.
#[derive(Deserialize)]
struct Keys {
    #[serde(default)]
    pg_config: Option<IgnoredAny>,
    #[serde(default, rename = "traceEvents")]
    trace_events: Option<IgnoredAny>,
    #[serde(default, rename = "schemaVersion")]
    schema_version: Option<IgnoredAny>,
}

/// Reads a file, and decompresses it if its content is compressed.
fn read_bytes(path: &Path) -> Result<Vec<u8>, TraceError> {
    let unreadable = |source| TraceError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = fs::read(path).map_err(unreadable)?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let limit = MAX_COMPRESSION.saturating_mul(bytes.len() as u64);
    let mut content = Vec::new();
    GzDecoder::new(&*bytes)
        .take(limit)
        .read_to_end(&mut content)
        .map_err(unreadable)?;
    Ok(content)
}

/// A file to read.
pub(crate) struct Candidate {
    /// The file.
    pub path: PathBuf,
    /// Whether only its name, such as `dump_0`, suggests that it is a trace: other files have such names too.
    pub is_guess: bool,
}

/// The files to read: the path itself, or the files of all ranks in the directory. Traces of Trainyard take
/// precedence over those of PyTorch.
pub(crate) fn files_of(path: &Path) -> Result<Vec<Candidate>, TraceError> {
    let candidates = |files: Vec<PathBuf>, is_guess| {
        let candidate = |path| Candidate { path, is_guess };
        files.into_iter().map(candidate).collect()
    };
    if !path.is_dir() {
        return Ok(candidates(vec![path.to_owned()], false));
    }
    let names = names_in(path)?;
    let ours = ranked(path, &names);
    Ok(if ours.is_empty() {
        candidates(of_pytorch(path, &names), true)
    } else {
        candidates(ours, false)
    })
}

fn names_in(dir: &Path) -> Result<Vec<String>, TraceError> {
    let unreadable = |source| TraceError::Read {
        path: dir.to_owned(),
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        names.extend(entry.map_err(unreadable)?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// The traces that Trainyard wrote, in order of rank.
fn ranked(dir: &Path, names: &[String]) -> Vec<PathBuf> {
    let rank = |name: &String| Some((rank_of(name)?, dir.join(name)));
    let mut files: Vec<(usize, PathBuf)> = names.iter().filter_map(rank).collect();
    files.sort();
    files.into_iter().map(|(_, file)| file).collect()
}

/// The files that PyTorch may have written.
fn of_pytorch(dir: &Path, names: &[String]) -> Vec<PathBuf> {
    names
        .iter()
        .filter(|name| may_be_trace(name))
        .map(|name| dir.join(name))
        .filter(|file| file.is_file())
        .collect()
}

/// The inverse of [`chrome_file_name`](crate::chrome_file_name).
fn rank_of(file_name: &str) -> Option<usize> {
    file_name
        .strip_prefix("rank")?
        .strip_suffix(".json")?
        .parse()
        .ok()
}
