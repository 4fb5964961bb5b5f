//! Forwards the output of ranks from their pipes to the console and to log files.
//!
//! One thread per stream reads the pipes of all ranks. Incomplete lines of one rank do not delay another rank, and a
//! slow console does not delay the thread that supervises the ranks. That thread waits for the output only after all
//! ranks have exited.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::lines::{LineBuffer, SharedTail, prefix};
use crate::{Console, Job, LaunchError, Output};

/// The size of the read buffer.
const CHUNK: usize = 64 * 1024;

/// How often a pipe is read after its rank exited, for output that was still in it. A process that escaped and keeps
/// writing must not block the launcher forever.
const MAX_FINAL_READS: usize = 64;

/// One of the two output streams of a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    fn file_name(self) -> &'static str {
        match self {
            Stream::Stdout => "stdout.log",
            Stream::Stderr => "stderr.log",
        }
    }

    fn is_colored(self, no_color: Option<&OsStr>) -> bool {
        let is_terminal = match self {
            Stream::Stdout => io::stdout().is_terminal(),
            Stream::Stderr => io::stderr().is_terminal(),
        };
        is_terminal && no_color.is_none_or(OsStr::is_empty)
    }

    fn write(self, bytes: &[u8]) -> io::Result<()> {
        fn all(mut console: impl Write, bytes: &[u8]) -> io::Result<()> {
            console.write_all(bytes)?;
            console.flush()
        }
        match self {
            Stream::Stdout => all(io::stdout().lock(), bytes),
            Stream::Stderr => all(io::stderr().lock(), bytes),
        }
    }
}

/// One output stream of one rank.
#[derive(Debug)]
pub(crate) struct Source {
    pipe: Option<File>,
    lines: LineBuffer,
    tail: SharedTail,
    log: Option<(PathBuf, File)>,
    /// The prefix of lines on the console; `None` hides the rank.
    prefix: Option<String>,
}

impl Source {
    /// Opens the log file of one stream of a local rank, if there is one.
    pub(crate) fn new(
        job: &Job,
        local_rank: usize,
        stream: Stream,
        pipe: OwnedFd,
    ) -> Result<Source, LaunchError> {
        let (output, rank) = (&job.output, job.rank_of(local_rank));
        let no_color = std::env::var_os("NO_COLOR");
        let is_shown = output
            .console_ranks
            .as_ref()
            .is_none_or(|ranks| ranks.contains(&local_rank));
        let (label, number) = match &output.label {
            Some((label, first)) => (label.as_str(), first + local_rank),
            None => ("rank", rank),
        };
        let is_colored = stream.is_colored(no_color.as_deref());
        let prefix = match output.console {
            Console::Prefixed => Some(prefix(label, number, is_colored)),
            Console::Plain => Some(String::new()),
            Console::Silent => None,
        };
        Ok(Source {
            pipe: Some(pipe.into()),
            lines: LineBuffer::default(),
            tail: SharedTail::default(),
            log: open_log(local_rank, stream, output)?,
            prefix: prefix.filter(|_| is_shown),
        })
    }

    /// The last lines of the stream; they are updated while it is read.
    pub(crate) fn tail(&self) -> SharedTail {
        self.tail.clone()
    }

    /// Reads once and appends complete lines to `console`.
    fn read(&mut self, chunk: &mut [u8], console: &mut Vec<u8>) {
        let Some(pipe) = &mut self.pipe else { return };
        match pipe.read(chunk) {
            Ok(0) => self.close(console),
            Ok(length) => self.process(&chunk[..length], console),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.close(console),
        }
    }

    fn process(&mut self, bytes: &[u8], console: &mut Vec<u8>) {
        if let Some((path, log)) = &mut self.log
            && let Err(error) = log.write_all(bytes)
        {
            eprintln!(
                "warning: cannot write the log file {}, it ends here: {error}",
                path.display()
            );
            self.log = None;
        }
        let (tail, prefix) = (&self.tail, self.prefix.as_deref());
        self.lines
            .push(bytes, |line| show(line, prefix, tail, console));
    }

    fn close(&mut self, console: &mut Vec<u8>) {
        self.pipe = None;
        let (tail, prefix) = (&self.tail, self.prefix.as_deref());
        self.lines.finish(|line| show(line, prefix, tail, console));
        tail.finish();
    }
}

fn show(line: &[u8], prefix: Option<&str>, tail: &SharedTail, console: &mut Vec<u8>) {
    tail.push(line);
    if let Some(prefix) = prefix {
        console.extend_from_slice(prefix.as_bytes());
        console.extend_from_slice(line);
    }
}

fn open_log(
    rank: usize,
    stream: Stream,
    output: &Output,
) -> Result<Option<(PathBuf, File)>, LaunchError> {
    let Some(log_dir) = &output.log_dir else {
        return Ok(None);
    };
    let dir = log_dir.join(rank.to_string());
    let path = dir.join(stream.file_name());
    match fs::create_dir_all(&dir).and_then(|()| File::create(&path)) {
        Ok(file) => Ok(Some((path, file))),
        Err(source) => Err(LaunchError::Log { path, source }),
    }
}

/// Forwards the output of all ranks until every pipe is closed, or until the other end of `stop` is closed.
pub(crate) fn forward(stream: Stream, mut sources: Vec<Source>, stop: BorrowedFd<'_>) {
    let mut chunk = vec![0; CHUNK];
    let mut console = Vec::new();
    let mut num_final_reads = 0;
    while sources.iter().any(|source| source.pipe.is_some()) && num_final_reads < MAX_FINAL_READS {
        let is_stopping = num_final_reads > 0;
        let Ok((ready, stopped)) = wait(&sources, stop, is_stopping) else {
            break;
        };
        if stopped {
            num_final_reads += 1;
        }
        if is_stopping && ready.is_empty() {
            break;
        }
        for index in ready {
            sources[index].read(&mut chunk, &mut console);
        }
        print(stream, &mut console);
    }
    for source in &mut sources {
        source.close(&mut console);
    }
    print(stream, &mut console);
}

/// Errors are ignored: a closed console (`| head`) does not stop the job.
fn print(stream: Stream, console: &mut Vec<u8>) {
    if !console.is_empty() {
        let _ = stream.write(console);
        console.clear();
    }
}

/// The pipes that are readable, and whether to stop. Does not block when already stopping.
fn wait(
    sources: &[Source],
    stop: BorrowedFd<'_>,
    is_stopping: bool,
) -> io::Result<(Vec<usize>, bool)> {
    let open: Vec<(usize, &File)> = sources
        .iter()
        .enumerate()
        .filter_map(|(index, source)| Some((index, source.pipe.as_ref()?)))
        .collect();
    let mut fds: Vec<PollFd<'_>> = open
        .iter()
        .map(|(_, pipe)| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN))
        .chain([PollFd::from_borrowed_fd(stop, PollFlags::IN)])
        .collect();
    let no_wait = Timespec::default();
    rustix::io::retry_on_intr(|| poll(&mut fds, is_stopping.then_some(&no_wait)))?;
    let ready = open
        .iter()
        .zip(&fds)
        .filter(|(_, fd)| !fd.revents().is_empty())
        .map(|((index, _), _)| *index)
        .collect();
    let stopped = fds.last().is_some_and(|fd| !fd.revents().is_empty());
    Ok((ready, stopped))
}
