//! Splits the output of ranks into lines and prefixes each with its rank.
//!
//! A line ends with `\n`, or with `\r` as in progress bars. An incomplete line is buffered until its end arrives, so
//! that lines of different ranks never mix.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A line longer than this is split.
const MAX_LINE: usize = 64 * 1024;

/// How many of a rank's last lines are kept for the failure report.
const TAIL_LINES: usize = 20;

/// Buffers bytes and emits complete lines.
#[derive(Debug, Default)]
pub(crate) struct LineBuffer {
    buffer: Vec<u8>,
    /// The length of the prompt that was taken from the incomplete line.
    taken: usize,
}

impl LineBuffer {
    /// Appends bytes and passes every complete line to `emit`, its terminator included.
    pub(crate) fn push(&mut self, bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        self.buffer.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(length) = first_line(&self.buffer[start..]) {
            emit(&self.buffer[start..start + length]);
            start += length;
        }
        if start > 0 {
            self.buffer.drain(..start);
            self.taken = 0;
        }
    }

    /// Whether the incomplete line looks like a prompt that waits for an answer, and has not been taken.
    pub(crate) fn has_prompt(&self) -> bool {
        let is_prompt = self.buffer.ends_with(b" ") && !self.buffer.contains(&b'\r');
        is_prompt && self.buffer.len() > self.taken
    }

    /// The prompt, once: two ranks with prompts would otherwise show theirs in turn forever.
    pub(crate) fn take_prompt(&mut self) -> Option<&[u8]> {
        if !self.has_prompt() {
            return None;
        }
        self.taken = self.buffer.len();
        Some(&self.buffer)
    }

    /// Emits the incomplete line that is left, with a terminator.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.buffer.is_empty() {
            if self.buffer.last() != Some(&b'\r') {
                self.buffer.push(b'\n');
            }
            emit(&self.buffer);
            self.buffer.clear();
            self.taken = 0;
        }
    }
}

/// The length of the first line, or `None` if it is incomplete.
fn first_line(bytes: &[u8]) -> Option<usize> {
    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
    match end {
        Some(end) if bytes[end] == b'\n' => Some(end + 1),
        Some(end) => match bytes.get(end + 1) {
            Some(b'\n') => Some(end + 2),
            Some(_) => Some(end + 1),
            // This may be the first half of "\r\n".
            None => None,
        },
        None => (bytes.len() >= MAX_LINE).then_some(MAX_LINE),
    }
}

/// The prefix of a rank's lines.
pub(crate) fn prefix(label: &str, number: usize, is_colored: bool) -> String {
    if is_colored {
        format!("\x1b[{}m[{label}{number}]:\x1b[0m ", 31 + number % 6)
    } else {
        format!("[{label}{number}]: ")
    }
}

/// The last lines of a rank's stderr. One thread writes them and another reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedTail(Arc<(Mutex<Tail>, Condvar)>);

impl SharedTail {
    /// Appends a line.
    pub(crate) fn push(&self, line: &[u8]) {
        self.tail().push(line);
    }

    /// Marks the tail as complete.
    pub(crate) fn finish(&self) {
        self.tail().is_complete = true;
        self.0.1.notify_all();
    }

    /// The lines so far, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.tail().lines.iter().cloned().collect()
    }

    /// The lines once the tail is complete, or after `timeout`: a process that the rank has started may keep writing.
    pub(crate) fn complete_lines(&self, timeout: Duration) -> Vec<String> {
        let (_, completed) = &*self.0;
        let is_incomplete = |tail: &mut Tail| !tail.is_complete;
        drop(completed.wait_timeout_while(self.tail(), timeout, is_incomplete));
        self.lines()
    }

    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<String>,
    is_complete: bool,
}

impl Tail {
    /// Appends a line and drops the oldest one if there are too many. Lines that a progress bar will overwrite are
    /// skipped.
    fn push(&mut self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end();
        if line.ends_with(b"\r") || text.is_empty() {
            return;
        }
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(chunks: &[&[u8]]) -> Vec<String> {
        let mut lines = LineBuffer::default();
        let mut emitted = Vec::new();
        let mut emit = |line: &[u8]| emitted.push(String::from_utf8_lossy(line).into_owned());
        for chunk in chunks {
            lines.push(chunk, &mut emit);
        }
        lines.finish(&mut emit);
        emitted
    }

    #[test]
    fn an_incomplete_line_is_buffered() {
        assert_eq!(lines(&[b"ab", b"c\nd"]), ["abc\n", "d\n"]);
        assert_eq!(lines(&[b""]), [""; 0]);
    }

    #[test]
    fn a_prompt_is_taken_once() {
        let mut lines = LineBuffer::default();
        lines.push(b"(Pdb) ", |_| {});
        assert_eq!(lines.take_prompt(), Some(&b"(Pdb) "[..]));
        assert_eq!(lines.take_prompt(), None);
        lines.push(b"3\n(Pdb) ", |_| {});
        assert_eq!(lines.take_prompt(), Some(&b"(Pdb) "[..]));
        lines.push(b"\n50% done", |_| {});
        assert_eq!(lines.take_prompt(), None);
    }

    #[test]
    fn a_carriage_return_ends_a_line() {
        assert_eq!(
            lines(&[b"10%\r20%\r", b"done\n"]),
            ["10%\r", "20%\r", "done\n"]
        );
    }

    #[test]
    fn a_crlf_terminator_is_not_split() {
        assert_eq!(lines(&[b"a\r", b"\nb\r\n"]), ["a\r\n", "b\r\n"]);
    }

    #[test]
    fn a_line_without_end_is_split() {
        let long = vec![b'x'; MAX_LINE * 2 + 1];
        let lengths: Vec<_> = lines(&[&long]).iter().map(String::len).collect();
        assert_eq!(lengths, [MAX_LINE, MAX_LINE, 2]);
    }

    #[test]
    fn the_prefix_has_the_rank() {
        assert_eq!(prefix("rank", 12, false), "[rank12]: ");
        assert!(prefix("rank", 0, true).contains("[rank0]:"));
    }

    #[test]
    fn the_tail_keeps_the_last_lines_and_skips_progress_bars() {
        let tail = SharedTail::default();
        for i in 0..30 {
            tail.push(format!("line {i}\n").as_bytes());
            tail.push(b"10%\r");
            tail.push(b"\n");
        }
        let tail_lines = tail.lines();
        assert_eq!(tail_lines.len(), TAIL_LINES);
        assert_eq!(tail_lines[0], "line 10");
        assert_eq!(tail_lines[TAIL_LINES - 1], "line 29");
    }

    proptest! {
        #[test]
        fn no_byte_is_lost_however_the_output_is_split(
            bytes in prop::collection::vec(prop::sample::select(b"ab\r\n".to_vec()), 0..60),
            cut in 0usize..60,
        ) {
            let cut = cut.min(bytes.len());
            let expected = lines(&[&bytes]);
            prop_assert_eq!(&expected, &lines(&[&bytes[..cut], &bytes[cut..]]));
            let text = String::from_utf8(bytes).unwrap();
            let joined = expected.concat();
            prop_assert_eq!(joined.strip_suffix('\n').unwrap_or(&joined), text.strip_suffix('\n').unwrap_or(&text));
        }
    }
}
