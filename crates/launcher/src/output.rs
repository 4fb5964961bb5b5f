//! Forwards the output of ranks from their pipes to the console and to log files.
//!
//! One thread per stream reads the pipes of all ranks. Incomplete lines of one rank do not delay another rank, and a
//! slow console does not delay the thread that supervises the ranks. That thread waits for the output only after all
//! ranks have exited.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::console_lines::ConsoleLines;
use crate::line_filters::FilteredLog;
use crate::lines::{LineBuffer, SharedTail, prefix};
use crate::progress::JobProgress;
use crate::template::substitute;
use crate::{Console, Job, LaunchError, Output, color};

/// torchrun's variable with the prefix of lines.
const PREFIX_TEMPLATE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";

/// The size of the read buffer.
const CHUNK: usize = 64 * 1024;

/// How long a line must be incomplete to count as a prompt.
const PROMPT_DELAY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

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
    fn name(self) -> &'static str {
        match self {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        }
    }

    fn is_colored(self) -> bool {
        match self {
            Stream::Stdout => color::on_stdout(),
            Stream::Stderr => color::on_stderr(),
        }
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

/// Where the lines of a stream go that are not in a rank's log file.
#[derive(Debug)]
struct Destination {
    console: ConsoleLines,
    filtered: Option<FilteredLog>,
}

/// One output stream of one rank.
#[derive(Debug)]
pub(crate) struct Source {
    local_rank: usize,
    pipe: Option<File>,
    lines: LineBuffer,
    tail: SharedTail,
    log: Option<(PathBuf, File)>,
    /// The prefix of lines on the console; `None` hides the rank.
    prefix: Option<String>,
    /// The prefix of lines in the log of filtered lines, without color.
    log_prefix: String,
    /// The prefix as programs write it themselves, libtorch among them.
    own_prefix: String,
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
        let is_shown = output
            .console_ranks
            .as_ref()
            .is_none_or(|ranks| ranks.contains(&local_rank));
        let (label, number) = match &output.label {
            Some((label, first)) => (label.as_str(), first + local_rank),
            None => ("rank", rank),
        };
        let is_colored = stream.is_colored();
        let own = own_prefix(job, local_rank);
        let added = |is_colored| {
            let own = own.clone();
            own.unwrap_or_else(|| prefix(label, number, is_colored))
        };
        let prefix = match output.console {
            Console::Prefixed => Some(added(is_colored)),
            Console::Plain => Some(String::new()),
            Console::Silent => None,
        };
        let is_redirected = output.redirects.contains(local_rank, stream);
        let is_shown = is_shown && (!is_redirected || output.tee.contains(local_rank, stream));
        Ok(Source {
            local_rank,
            pipe: Some(pipe.into()),
            lines: LineBuffer::default(),
            tail: SharedTail::default(),
            log: open_log(local_rank, stream, output)?,
            prefix: prefix.filter(|_| is_shown),
            log_prefix: added(false),
            own_prefix: format!("[{label}{number}]:"),
        })
    }

    /// The last lines of the stream; they are updated while it is read.
    pub(crate) fn tail(&self) -> SharedTail {
        self.tail.clone()
    }

    /// Reads once and forwards complete lines.
    fn read(&mut self, chunk: &mut [u8], to: &mut Destination) {
        let Some(pipe) = &mut self.pipe else { return };
        match pipe.read(chunk) {
            Ok(0) => self.close(to),
            Ok(length) => self.process(&chunk[..length], to),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.close(to),
        }
    }

    fn process(&mut self, bytes: &[u8], to: &mut Destination) {
        if let Some((path, log)) = &mut self.log
            && let Err(error) = log.write_all(bytes)
        {
            eprintln!(
                "warning: cannot write the log file {}, it ends here: {error}",
                path.display()
            );
            self.log = None;
        }
        self.emit(to, |lines, show| lines.push(bytes, show));
    }

    fn close(&mut self, to: &mut Destination) {
        self.pipe = None;
        self.emit(to, |lines, show| lines.finish(show));
        self.tail.finish();
    }

    /// Forwards the lines that `take` takes.
    fn emit(
        &mut self,
        to: &mut Destination,
        take: impl FnOnce(&mut LineBuffer, &mut dyn FnMut(&[u8])),
    ) {
        take(&mut self.lines, &mut |line| {
            self.tail.push(line);
            if let Some(prefix) = &self.prefix {
                let line = without_prefix(line, &self.own_prefix, prefix);
                to.console.line(self.local_rank, prefix, line);
                if let Some(filtered) = &mut to.filtered {
                    filtered.push(&self.log_prefix, line);
                }
            }
        });
    }

    /// Shows the prompt at which the rank waits, if it does.
    fn show_prompt(&mut self, console: &mut ConsoleLines) {
        if let (Some(prefix), Some(text)) = (&self.prefix, self.lines.take_prompt()) {
            let text = without_prefix(text, &self.own_prefix, prefix);
            console.prompt(self.local_rank, prefix, text);
        }
    }
}

/// A line without the prefix that the program has written, if the launcher adds the same one.
fn without_prefix<'a>(line: &'a [u8], own: &str, added: &str) -> &'a [u8] {
    if added.is_empty() {
        return line;
    }
    match line.strip_prefix(own.as_bytes()) {
        Some(rest) => rest.strip_prefix(b" ").unwrap_or(rest),
        None => line,
    }
}

/// The prefix that the user has asked for, in the notation of torchrun.
fn own_prefix(job: &Job, local_rank: usize) -> Option<String> {
    let template = std::env::var(PREFIX_TEMPLATE).ok()?;
    let rank = job.rank_of(local_rank).to_string();
    let local_rank = (job.first_local_rank + local_rank).to_string();
    let values = [
        ("role_name", job.role.as_str()),
        ("rank", &rank),
        ("local_rank", &local_rank),
    ];
    (!template.is_empty()).then(|| substitute(&template, &values))
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
    let path = dir.join(format!("{}.log", stream.name()));
    match fs::create_dir_all(&dir).and_then(|()| File::create(&path)) {
        Ok(file) => Ok(Some((path, file))),
        Err(source) => Err(LaunchError::Log { path, source }),
    }
}

/// Creates the file for the lines of a stream that filters select, if there are any.
pub(crate) fn create_filtered_log(
    stream: Stream,
    output: &Output,
) -> Result<Option<FilteredLog>, LaunchError> {
    let filters = match stream {
        Stream::Stdout => &output.stdout_filters,
        Stream::Stderr => &output.stderr_filters,
    };
    let dir = output.log_dir.as_ref().filter(|_| !filters.is_empty());
    let path = dir.map(|dir| dir.join(format!("filtered_{}.log", stream.name())));
    path.map(|path| FilteredLog::create(filters.clone(), path))
        .transpose()
}

/// Forwards the output of all ranks until every pipe is closed, or until the other end of `stop` is closed. Lines do not
/// mix with the progress bar.
pub(crate) fn forward(
    stream: Stream,
    mut sources: Vec<Source>,
    filtered: Option<FilteredLog>,
    progress: &JobProgress,
    stop: BorrowedFd<'_>,
) {
    let mut chunk = vec![0; CHUNK];
    let mut to = Destination {
        console: ConsoleLines::default(),
        filtered,
    };
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
        if ready.is_empty() {
            for source in &mut sources {
                source.show_prompt(&mut to.console);
            }
        }
        for index in ready {
            sources[index].read(&mut chunk, &mut to);
        }
        progress.suspend(|| print(stream, &to.console.take()));
    }
    for source in &mut sources {
        source.close(&mut to);
    }
    progress.suspend(|| print(stream, &to.console.take()));
}

/// Errors are ignored: a closed console (`| head`) does not stop the job.
fn print(stream: Stream, bytes: &[u8]) {
    if !bytes.is_empty() {
        let _ = stream.write(bytes);
    }
}

/// The pipes that are readable, and whether to stop. Does not block when already stopping, and not for long if a rank
/// may show a prompt.
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
    let has_prompt = sources.iter().any(|source| source.lines.has_prompt());
    let limit = if is_stopping {
        Some(Timespec::default())
    } else {
        has_prompt.then_some(PROMPT_DELAY)
    };
    rustix::io::retry_on_intr(|| poll(&mut fds, limit.as_ref()))?;
    let ready = open
        .iter()
        .zip(&fds)
        .filter(|(_, fd)| !fd.revents().is_empty())
        .map(|((index, _), _)| *index)
        .collect();
    let stopped = fds.last().is_some_and(|fd| !fd.revents().is_empty());
    Ok((ready, stopped))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_named_once() {
        let shown = |line: &'static str, added| without_prefix(line.as_bytes(), "[rank1]:", added);
        assert_eq!(shown("[rank1]:[W1] slow\n", "[rank1]: "), b"[W1] slow\n");
        assert_eq!(shown("[rank1]: slow\n", "[rank1]: "), b"slow\n");
        assert_eq!(shown("[rank10]: slow\n", "[rank1]: "), b"[rank10]: slow\n");
        assert_eq!(shown("[rank1]: slow\n", ""), b"[rank1]: slow\n");
    }
}
