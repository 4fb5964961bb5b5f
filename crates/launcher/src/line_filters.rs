//! Lines that are written to a file of their own because they contain a text, as torchrun's `--duplicate-stdout-filters`
//! asks for.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;

use crate::LaunchError;

/// The texts, of which a line must contain one. Two commas in their list are one comma in a text.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LineFilters(Vec<String>);

impl LineFilters {
    /// Whether no line is selected.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn selects(&self, line: &[u8]) -> bool {
        let contains = |text: &String| {
            let windows = &mut line.windows(text.len());
            windows.any(|window| window == text.as_bytes())
        };
        self.0.iter().any(contains)
    }
}

impl FromStr for LineFilters {
    type Err = Infallible;

    fn from_str(list: &str) -> Result<LineFilters, Infallible> {
        let mut texts = vec![String::new()];
        let mut chars = list.chars().peekable();
        while let Some(char) = chars.next() {
            let is_escaped = char == ',' && chars.next_if_eq(&',').is_some();
            match texts.last_mut() {
                Some(text) if char != ',' || is_escaped => text.push(char),
                _ => texts.push(String::new()),
            }
        }
        texts.retain(|text| !text.is_empty());
        Ok(LineFilters(texts))
    }
}

/// The file with the selected lines of all ranks of a node.
#[derive(Debug)]
pub(crate) struct FilteredLog {
    filters: LineFilters,
    path: PathBuf,
    file: Option<File>,
}

impl FilteredLog {
    /// Creates the file.
    pub(crate) fn create(filters: LineFilters, path: PathBuf) -> Result<FilteredLog, LaunchError> {
        let dir = path.parent().map_or(Ok(()), fs::create_dir_all);
        match dir.and_then(|()| File::create(&path)) {
            Ok(file) => Ok(FilteredLog {
                filters,
                path,
                file: Some(file),
            }),
            Err(source) => Err(LaunchError::Log { path, source }),
        }
    }

    /// Writes a line, with its prefix, if a filter selects it.
    pub(crate) fn push(&mut self, prefix: &str, line: &[u8]) {
        let Some(file) = &mut self.file else { return };
        if !self.filters.selects(line) {
            return;
        }
        if let Err(error) = file.write_all(&[prefix.as_bytes(), line].concat()) {
            let path = self.path.display();
            eprintln!("warning: cannot write {path}, it ends here: {error}");
            self.file = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filters(list: &str) -> LineFilters {
        let Ok(filters) = list.parse();
        filters
    }

    #[test]
    fn two_commas_are_one_of_a_text() {
        assert_eq!(filters("a b,c").0, ["a b", "c"]);
        assert_eq!(filters("a,,b,c").0, ["a,b", "c"]);
        assert_eq!(filters(",,,a").0, [",", "a"]);
        assert!(filters("").is_empty());
    }

    #[test]
    fn a_line_with_one_of_the_texts_is_selected() {
        assert!(filters("loss,error").selects(b"an error\n"));
        assert!(!filters("loss,error").selects(b"a warning\n"));
        assert!(!filters("").selects(b"an error\n"));
    }
}
