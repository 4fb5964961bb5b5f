//! A visitor of Thrift's compact protocol, which Parquet's headers use. It keeps nothing in memory.
//!
//! The `parquet` crate allocates as much as a header declares and recurses as deep as a schema nests. So
//! every header is visited here first, and rejected if its declarations are not plausible.

use std::io::{self, Read};

/// The deepest accepted nesting of structs; Parquet's structs nest six deep.
const MAX_DEPTH: usize = 32;

/// What the visitor reports.
pub(crate) enum Event {
    /// An integer, or a boolean as 0 or 1.
    Number(i64),
    /// The end of a struct.
    End,
}

/// Visits one struct. Calls `visit` with every event and its path of field numbers; elements of a list have
/// the path of the list.
pub(crate) fn walk(reader: &mut dyn Read, visit: &mut dyn FnMut(&[i64], Event)) -> io::Result<()> {
    let mut walk = Walk {
        reader,
        visit,
        path: Vec::new(),
    };
    walk.structure(0)
}

struct Walk<'a> {
    reader: &'a mut dyn Read,
    visit: &'a mut dyn FnMut(&[i64], Event),
    path: Vec<i64>,
}

impl Walk<'_> {
    fn structure(&mut self, depth: usize) -> io::Result<()> {
        if depth == MAX_DEPTH {
            return Err(invalid("a header nests too deeply"));
        }
        let mut id = 0i64;
        loop {
            let head = self.byte()?;
            if head & 15 == 0 {
                (self.visit)(&self.path, Event::End);
                return Ok(());
            }
            id = match head >> 4 {
                0 => self.zigzag()?,
                step => id.wrapping_add(i64::from(step)),
            };
            self.path.push(id);
            match head & 15 {
                // The type of a boolean field encodes its value.
                kind @ (1 | 2) => (self.visit)(&self.path, Event::Number(i64::from(kind == 1))),
                kind => self.value(kind, depth)?,
            }
            self.path.pop();
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> io::Result<()> {
        match kind {
            1..=3 => self.skip(1),
            4..=6 => {
                let number = self.zigzag()?;
                (self.visit)(&self.path, Event::Number(number));
                Ok(())
            }
            7 => self.skip(8),
            8 => {
                let length = self.varint()?;
                self.skip(length)
            }
            9 | 10 => self.list(depth),
            12 => self.structure(depth + 1),
            _ => Err(invalid(
                "a header has a field of a type that Parquet does not use",
            )),
        }
    }

    /// Every element takes at least one byte, so a count that is too high fails at the end of the input.
    fn list(&mut self, depth: usize) -> io::Result<()> {
        let head = self.byte()?;
        let count = match head >> 4 {
            15 => self.varint()?,
            few => u64::from(few),
        };
        // Reject nested lists, which would recurse without increasing the depth.
        if matches!(head & 15, 9 | 10) {
            return Err(invalid("a header has a list of lists"));
        }
        (0..count).try_for_each(|_| self.value(head & 15, depth))
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.reader.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(number);
            }
        }
        Err(invalid("a header has an integer of more than 64 bits"))
    }

    fn zigzag(&mut self) -> io::Result<i64> {
        let number = self.varint()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut *self.reader).take(length), &mut io::sink())?;
        if skipped == length {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
