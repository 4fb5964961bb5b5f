//! The place in the user's code that called a collective.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};

/// A line of Python code.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Frame {
    /// The name of the file, without its directories.
    pub file: String,
    /// The number of the line.
    pub line: u64,
    /// The name of the function.
    pub function: String,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Frame {
            file,
            line,
            function,
        } = self;
        write!(f, "{file}:{line} in {function}")
    }
}

/// A frame of a stack, as a dump has it.
#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    filename: Cow<'a, str>,
    line: u64,
}

/// Files of the standard library whose functions wrap those of PyTorch.
const WRAPPERS: [&str; 3] = ["typing_extensions.py", "contextlib.py", "functools.py"];

/// Names of files and functions are shorter.
const MAX_NAME: usize = 256;

impl Raw<'_> {
    fn file(&self) -> &str {
        self.filename
            .rsplit_once('/')
            .map_or(&*self.filename, |(_, file)| file)
    }

    /// Whether it is Python code (a stack may have frames of C++), and neither PyTorch nor a wrapper of it.
    fn is_of_user(&self) -> bool {
        let is_python = self.filename.ends_with(".py") || self.filename.starts_with('<');
        is_python && !self.filename.contains("/torch/") && !WRAPPERS.contains(&self.file())
    }

    fn to_frame(&self) -> Frame {
        Frame {
            file: shortened(self.file()),
            line: self.line,
            function: shortened(&self.name),
        }
    }
}

/// Pickles share names between frames, so a long name must not be copied into every collective.
fn shortened(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
}

/// Reads a stack, innermost frame first, and keeps the innermost frame outside of PyTorch. A dump has dozens
/// of frames per collective, so the others are not stored.
pub(super) fn innermost<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Frame>, D::Error> {
    deserializer.deserialize_seq(Stack)
}

struct Stack;

impl<'de> Visitor<'de> for Stack {
    type Value = Option<Frame>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of stack frames")
    }

    fn visit_unit<E>(self) -> Result<Option<Frame>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut frames: A) -> Result<Option<Frame>, A::Error> {
        let mut innermost = None;
        while let Some(raw) = frames.next_element::<Raw<'de>>()? {
            if innermost.is_none() && raw.is_of_user() {
                innermost = Some(raw.to_frame());
            }
        }
        Ok(innermost)
    }
}
