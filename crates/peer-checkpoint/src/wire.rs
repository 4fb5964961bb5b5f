//! Requests and replies of a replica server, as bytes.
//!
//! A message is one byte for its kind, then its fields: numbers in 8 bytes, little endian; text after its length in 2
//! bytes; a last field of raw bytes extends to the end. Every message has exactly one encoding, and the decoder
//! rejects everything else. Decoded messages borrow from their input, so decoding allocates nothing, whatever lengths
//! the input claims.

use trainyard_tls::MessageProtocol;

/// How many bytes of a file one message carries at most.
pub(crate) const CHUNK_BYTES: usize = 4 << 20;
/// The size of the longest message: a chunk and its header.
pub(crate) const MAX_MESSAGE_BYTES: usize = CHUNK_BYTES + 4096;
/// The messages of replica servers.
pub(crate) const PROTOCOL: MessageProtocol = MessageProtocol {
    server_name: "replica server",
    max_message_bytes: MAX_MESSAGE_BYTES,
};
/// The size of the longest path.
pub(crate) const MAX_PATH_BYTES: usize = 1024;

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    /// Starts a file, and discards an unfinished one of this connection. Has no reply.
    Create { path: &'a str },
    /// Appends to the file. Has no reply.
    Append { bytes: &'a [u8] },
    /// Makes the file visible, in place of an older one with the same path.
    Finish,
    /// Asks for the size of a file.
    Size { path: &'a str },
    /// Reads a range of a file, at most one chunk.
    Read {
        path: &'a str,
        start: u64,
        length: u64,
    },
    /// Lists a directory.
    List { dir: &'a str },
    /// Deletes a file.
    Remove { path: &'a str },
    /// Deletes a directory with everything in it.
    RemoveDir { dir: &'a str },
}

/// The reply of a replica server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply<'a> {
    /// The request succeeded.
    Done,
    /// The file does not exist.
    Missing,
    /// The size of the file.
    Size(u64),
    /// The bytes read; fewer than requested if the file ends before.
    Bytes(&'a [u8]),
    /// The names in the directory.
    Names(Vec<&'a str>),
    /// The request failed, with the reason.
    Rejected(&'a str),
}

/// Bytes that are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
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
            Request::List { dir } => Writer::new(6).text(dir).0,
            Request::Remove { path } => Writer::new(7).text(path).0,
            Request::RemoveDir { dir } => Writer::new(8).text(dir).0,
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
                dir: reader.path()?,
            },
            7 => Request::Remove {
                path: reader.path()?,
            },
            8 => Request::RemoveDir {
                dir: reader.path()?,
            },
            _ => return Err(Malformed("unknown request")),
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
            Reply::Rejected(reason) => Writer::new(6).text(reason).0,
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
            6 => Reply::Rejected(reader.text()?),
            _ => return Err(Malformed("unknown reply")),
        };
        reader.end(reply)
    }
}

/// Encodes a message.
struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u8) -> Writer {
        Writer(vec![kind])
    }

    fn number(mut self, number: u64) -> Writer {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// Truncates text that is too long. Paths are checked before they are sent.
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

/// The rest of a message that is being decoded.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn begin(bytes: &'a [u8]) -> Result<(u8, Reader<'a>), Malformed> {
        let (kind, rest) = bytes.split_first().ok_or(Malformed("it is empty"))?;
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
        std::str::from_utf8(text).map_err(|_| Malformed("its text is not UTF-8"))
    }

    fn path(&mut self) -> Result<&'a str, Malformed> {
        let path = self.text()?;
        if path.len() <= MAX_PATH_BYTES {
            Ok(path)
        } else {
            Err(Malformed("its path is too long"))
        }
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn end<T>(self, message: T) -> Result<T, Malformed> {
        if self.0.is_empty() {
            Ok(message)
        } else {
            Err(Malformed("it has trailing bytes"))
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
        fn requests_round_trip(path in ".{0,200}", bytes in vec(any::<u8>(), 0..300), a: u64, b: u64) {
            let path = path.as_str();
            for request in [
                Request::Create { path },
                Request::Append { bytes: &bytes },
                Request::Finish,
                Request::Size { path },
                Request::Read { path, start: a, length: b },
                Request::List { dir: path },
                Request::Remove { path },
                Request::RemoveDir { dir: path },
            ] {
                let bytes = request.encode();
                prop_assert_eq!(Request::decode(&bytes), Ok(request));
            }
        }

        #[test]
        fn replies_round_trip(names in vec(".{0,50}", 0..20), bytes in vec(any::<u8>(), 0..300), size: u64) {
            for reply in [
                Reply::Done,
                Reply::Missing,
                Reply::Size(size),
                Reply::Bytes(&bytes),
                Reply::Names(names.iter().map(String::as_str).collect()),
                Reply::Rejected(names.first().map_or("", String::as_str)),
            ] {
                let bytes = reply.encode();
                prop_assert_eq!(Reply::decode(&bytes), Ok(reply.clone()));
            }
        }

        /// Whatever decodes encodes to the same bytes, and no message is larger than its encoding.
        #[test]
        fn random_bytes_are_rejected_or_round_trip(bytes in vec(any::<u8>(), 0..400), kind in 0u8..10) {
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
        fn truncated_messages_are_rejected(path in "[a-z]{1,40}", start: u64, cut in 0usize..60) {
            let message = Request::Read { path: &path, start, length: 1 }.encode();
            let cut = cut % message.len();
            prop_assert!(Request::decode(&message[..cut]).is_err());
        }
    }

    #[test]
    fn long_paths_are_rejected() {
        let path = "x".repeat(MAX_PATH_BYTES + 1);
        assert!(Request::decode(&Request::Size { path: &path }.encode()).is_err());
        assert!(Request::decode(&Request::Size { path: &path[1..] }.encode()).is_ok());
    }
}
