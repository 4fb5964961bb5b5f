//! What a client asks of a holder and what it answers, as bytes.
//!
//! A message is a byte that says what it is, and its fields: numbers in 8 bytes, little end first;
//! text behind its length in 2 bytes; a message's last field, if it is bytes, goes to the end. There is
//! one way to write each, and everything else is refused. Messages refer to the bytes they were read
//! from, so reading one takes no memory, whatever it claims.

/// Bytes of a file that go in one message.
pub(crate) const CHUNK: usize = 4 << 20;
/// Longest message: a chunk, and room for the rest.
pub(crate) const LONGEST: usize = CHUNK + 4096;
/// Longest path.
pub(crate) const LONGEST_PATH: usize = 1024;

/// What a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    /// Begins a file; one that this connection has begun before is forgotten. No answer.
    Create { path: &'a str },
    /// Appends to it. No answer.
    Append { bytes: &'a [u8] },
    /// Puts it in its place, over one that may be there.
    Finish,
    /// How long a file is.
    Size { path: &'a str },
    /// Bytes of a file, at most a chunk.
    Read {
        path: &'a str,
        start: u64,
        length: u64,
    },
    /// Names in a folder.
    List { folder: &'a str },
    /// Deletes a file.
    Remove { path: &'a str },
    /// Deletes a folder.
    RemoveFolder { folder: &'a str },
}

/// What a holder answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply<'a> {
    /// It is done.
    Done,
    /// There is no such file.
    Missing,
    /// How long the file is.
    Size(u64),
    /// What was to be read.
    Bytes(&'a [u8]),
    /// What is in the folder.
    Names(Vec<&'a str>),
    /// It is not done, and why.
    Refused(&'a str),
}

/// Bytes that are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bytes that are no message: {0}")]
pub(crate) struct Malformed(&'static str);

impl<'a> Request<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Request::Create { path } => Writer::new(1).text(path).0,
            Request::Append { bytes } => Writer::new(2).rest(bytes).0,
            Request::Finish => Writer::new(3).0,
            Request::Size { path } => Writer::new(4).text(path).0,
            Request::Read {
                path,
                start,
                length,
            } => Writer::new(5).text(path).number(*start).number(*length).0,
            Request::List { folder } => Writer::new(6).text(folder).0,
            Request::Remove { path } => Writer::new(7).text(path).0,
            Request::RemoveFolder { folder } => Writer::new(8).text(folder).0,
        }
    }

    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let (kind, mut reader) = Reader::begin(bytes)?;
        let request = match kind {
            1 => Request::Create {
                path: reader.path()?,
            },
            2 => Request::Append {
                bytes: reader.rest(),
            },
            3 => Request::Finish,
            4 => Request::Size {
                path: reader.path()?,
            },
            5 => Request::Read {
                path: reader.path()?,
                start: reader.number()?,
                length: reader.number()?,
            },
            6 => Request::List {
                folder: reader.path()?,
            },
            7 => Request::Remove {
                path: reader.path()?,
            },
            8 => Request::RemoveFolder {
                folder: reader.path()?,
            },
            _ => return Err(Malformed("an unknown request")),
        };
        reader.end(request)
    }
}

impl<'a> Reply<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Reply::Done => Writer::new(1).0,
            Reply::Missing => Writer::new(2).0,
            Reply::Size(size) => Writer::new(3).number(*size).0,
            Reply::Bytes(bytes) => Writer::new(4).rest(bytes).0,
            Reply::Names(names) => names.iter().fold(Writer::new(5), |w, name| w.text(name)).0,
            Reply::Refused(reason) => Writer::new(6).text(reason).0,
        }
    }

    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Reply<'a>, Malformed> {
        let (kind, mut reader) = Reader::begin(bytes)?;
        let reply = match kind {
            1 => Reply::Done,
            2 => Reply::Missing,
            3 => Reply::Size(reader.number()?),
            4 => Reply::Bytes(reader.rest()),
            5 => {
                let mut names = Vec::new();
                while !reader.0.is_empty() {
                    names.push(reader.text()?);
                }
                Reply::Names(names)
            }
            6 => Reply::Refused(reader.text()?),
            _ => return Err(Malformed("an unknown reply")),
        };
        reader.end(reply)
    }
}

/// A message that is being written.
struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u8) -> Writer {
        Writer(vec![kind])
    }

    fn number(mut self, number: u64) -> Writer {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// Text that is too long is cut; whoever sends paths has checked them.
    fn text(mut self, text: &str) -> Writer {
        let ends = (0..=text.len().min(u16::MAX.into())).rev();
        let end = ends.into_iter().find(|end| text.is_char_boundary(*end));
        let text = &text.as_bytes()[..end.unwrap_or(0)];
        self.0.extend((text.len() as u16).to_le_bytes());
        self.0.extend(text);
        self
    }

    fn rest(mut self, bytes: &[u8]) -> Writer {
        self.0.extend(bytes);
        self
    }
}

/// What is left to read of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn begin(bytes: &'a [u8]) -> Result<(u8, Reader<'a>), Malformed> {
        let (kind, rest) = bytes.split_first().ok_or(Malformed("nothing"))?;
        Ok((*kind, Reader(rest)))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let short = Malformed("it ends too early");
        let (taken, rest) = self.0.split_at_checked(length).ok_or(short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, Malformed> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(bytes))
    }

    fn text(&mut self) -> Result<&'a str, Malformed> {
        let mut length = [0; 2];
        length.copy_from_slice(self.take(2)?);
        let text = self.take(u16::from_le_bytes(length).into())?;
        std::str::from_utf8(text).map_err(|_| Malformed("text that is none"))
    }

    fn path(&mut self) -> Result<&'a str, Malformed> {
        let path = self.text()?;
        match path.len() <= LONGEST_PATH {
            true => Ok(path),
            false => Err(Malformed("a path that is too long")),
        }
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn end<T>(self, message: T) -> Result<T, Malformed> {
        match self.0.is_empty() {
            true => Ok(message),
            false => Err(Malformed("something follows it")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_are_read_back(path in ".{0,200}", bytes in vec(any::<u8>(), 0..300), a: u64, b: u64) {
            let path = path.as_str();
            for request in [
                Request::Create { path },
                Request::Append { bytes: &bytes },
                Request::Finish,
                Request::Size { path },
                Request::Read { path, start: a, length: b },
                Request::List { folder: path },
                Request::Remove { path },
                Request::RemoveFolder { folder: path },
            ] {
                let bytes = request.encode();
                prop_assert_eq!(Request::decode(&bytes), Ok(request));
            }
        }

        #[test]
        fn replies_are_read_back(names in vec(".{0,50}", 0..20), bytes in vec(any::<u8>(), 0..300), size: u64) {
            for reply in [
                Reply::Done,
                Reply::Missing,
                Reply::Size(size),
                Reply::Bytes(&bytes),
                Reply::Names(names.iter().map(String::as_str).collect()),
                Reply::Refused(names.first().map_or("", String::as_str)),
            ] {
                let bytes = reply.encode();
                prop_assert_eq!(Reply::decode(&bytes), Ok(reply.clone()));
            }
        }

        /// Whatever is accepted is what would have been written: no bytes have two readings, and
        /// nothing in them makes a message larger than they are.
        #[test]
        fn random_bytes_are_refused_or_mean_themselves(bytes in vec(any::<u8>(), 0..400), kind in 0u8..10) {
            for bytes in [bytes.clone(), [&[kind], &bytes[..]].concat()] {
                if let Ok(request) = Request::decode(&bytes) {
                    prop_assert_eq!(request.encode(), bytes.clone());
                }
                if let Ok(reply) = Reply::decode(&bytes) {
                    if let Reply::Names(names) = &reply {
                        prop_assert!(names.len() <= bytes.len() / 2);
                    }
                    prop_assert_eq!(reply.encode(), bytes);
                }
            }
        }

        #[test]
        fn a_cut_message_is_none_or_another(path in "[a-z]{1,40}", start: u64, cut in 0usize..60) {
            let whole = Request::Read { path: &path, start, length: 1 }.encode();
            let cut = cut % whole.len();
            prop_assert!(Request::decode(&whole[..cut]).is_err());
        }
    }

    #[test]
    fn long_paths_are_refused() {
        let path = "x".repeat(LONGEST_PATH + 1);
        assert!(Request::decode(&Request::Size { path: &path }.encode()).is_err());
        assert!(Request::decode(&Request::Size { path: &path[1..] }.encode()).is_ok());
    }
}
