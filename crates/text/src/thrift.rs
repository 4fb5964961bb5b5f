//! Thrift's compact form, as Parquet's headers have it: walked, and nothing of it kept.
//!
//! The `parquet` crate allocates what a header claims and recurses as deep as a schema says. So every
//! header is walked here first, and refused where its claims are not borne out.

use std::io::{self, Read};

/// Structs in structs; Parquet's go six deep.
const MAX_DEPTH: usize = 32;

/// What is met on the way.
pub(crate) enum Event {
    /// A whole number, or a truth value as 0 or 1.
    Number(i64),
    /// The end of a struct.
    End,
}

/// Walks one struct. `see` is told what is met, and the numbers of the fields that lead to it; elements of
/// a list have the path of their list.
pub(crate) fn walk(reader: &mut dyn Read, see: &mut dyn FnMut(&[i64], Event)) -> io::Result<()> {
    let mut walk = Walk {
        reader,
        see,
        path: Vec::new(),
    };
    walk.structure(0)
}

struct Walk<'a> {
    reader: &'a mut dyn Read,
    see: &'a mut dyn FnMut(&[i64], Event),
    path: Vec<i64>,
}

impl Walk<'_> {
    fn structure(&mut self, depth: usize) -> io::Result<()> {
        if depth == MAX_DEPTH {
            return Err(wrong("a header nests too deeply"));
        }
        let mut id = 0i64;
        loop {
            let head = self.byte()?;
            if head & 15 == 0 {
                (self.see)(&self.path, Event::End);
                return Ok(());
            }
            id = match head >> 4 {
                0 => self.zigzag()?,
                step => id.wrapping_add(i64::from(step)),
            };
            self.path.push(id);
            match head & 15 {
                // A truth value of a field is in its type.
                kind @ (1 | 2) => (self.see)(&self.path, Event::Number(i64::from(kind == 1))),
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
                (self.see)(&self.path, Event::Number(number));
                Ok(())
            }
            7 => self.skip(8),
            8 => {
                let length = self.varint()?;
                self.skip(length)
            }
            9 | 10 => self.list(depth),
            12 => self.structure(depth + 1),
            _ => Err(wrong(
                "a header has a field of a type that Parquet does not use",
            )),
        }
    }

    /// Every element takes a byte or more, so a count that lies ends with the input.
    fn list(&mut self, depth: usize) -> io::Result<()> {
        let head = self.byte()?;
        let count = match head >> 4 {
            15 => self.varint()?,
            few => u64::from(few),
        };
        // A list in a list would come back here without going deeper.
        if matches!(head & 15, 9 | 10) {
            return Err(wrong("a header has a list of lists"));
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
        Err(wrong("a header has a number that does not end"))
    }

    fn zigzag(&mut self) -> io::Result<i64> {
        let number = self.varint()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut *self.reader).take(length), &mut io::sink())?;
        match skipped == length {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn wrong(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
