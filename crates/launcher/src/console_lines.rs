//! The lines of several ranks on one console: each in one piece and with the prefix of its rank, and prompts before their
//! line has ended.

/// What is to be written to the console.
#[derive(Debug, Default)]
pub(crate) struct ConsoleLines {
    bytes: Vec<u8>,
    /// The rank whose prompt stands in the last line, and how many bytes of its line that is.
    prompt: Option<(usize, usize)>,
}

impl ConsoleLines {
    /// Appends a line. If its rank's prompt is on the console, the rest of the line follows it.
    pub(crate) fn line(&mut self, rank: usize, prefix: &str, line: &[u8]) {
        let length = self.begin(rank, prefix);
        self.bytes
            .extend_from_slice(&line[length.min(line.len())..]);
        self.prompt = None;
    }

    /// Appends the beginning of a line, which may be on the console already.
    pub(crate) fn prompt(&mut self, rank: usize, prefix: &str, text: &[u8]) {
        let length = self.begin(rank, prefix);
        self.bytes
            .extend_from_slice(&text[length.min(text.len())..]);
        self.prompt = Some((rank, text.len()));
    }

    /// Begins a line of a rank, or goes on in it: how many of its bytes are there.
    fn begin(&mut self, rank: usize, prefix: &str) -> usize {
        match self.prompt {
            Some((owner, length)) if owner == rank => return length,
            Some(_) => self.bytes.push(b'\n'),
            None => {}
        }
        self.bytes.extend_from_slice(prefix.as_bytes());
        0
    }

    /// What was appended since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lines: &mut ConsoleLines) -> String {
        String::from_utf8(lines.take()).unwrap()
    }

    #[test]
    fn what_follows_a_prompt_stands_in_its_line() {
        let mut lines = ConsoleLines::default();
        lines.prompt(0, "[0]: ", b"(Pdb) ");
        lines.prompt(0, "[0]: ", b"(Pdb) ");
        assert_eq!(text(&mut lines), "[0]: (Pdb) ");
        lines.line(0, "[0]: ", b"(Pdb) 3\n");
        lines.line(0, "[0]: ", b"next\n");
        assert_eq!(text(&mut lines), "3\n[0]: next\n");
    }

    #[test]
    fn a_line_of_another_rank_does_not_stand_behind_a_prompt() {
        let mut lines = ConsoleLines::default();
        lines.prompt(0, "[0]: ", b"(Pdb) ");
        lines.line(1, "[1]: ", b"loss\n");
        lines.line(0, "[0]: ", b"(Pdb) 3\n");
        assert_eq!(text(&mut lines), "[0]: (Pdb) \n[1]: loss\n[0]: (Pdb) 3\n");
    }
}
