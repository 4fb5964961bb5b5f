//! The MNIST dataset of handwritten digits, in IDX files; `trainyard data prepare mnist` makes them.
//!
//! There are two files, one of images and one of labels. Each starts with a magic number for its content
//! and big-endian sizes, followed by one byte per pixel or label. Both are read into memory.

use std::path::{Path, PathBuf};

use crate::DataError;
use crate::source::{IMAGE_SIDE, Sample, Source, check_index};

const IMAGES: u32 = 0x0000_0803;
const LABELS: u32 = 0x0000_0801;
const PIXELS: usize = IMAGE_SIDE * IMAGE_SIDE;

/// Mean and standard deviation of the pixels of the training images, which normalize them.
const MEAN: f32 = 0.1307;
const STD: f32 = 0.3081;

/// A split of MNIST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The 60,000 training images.
    Train,
    /// The 10,000 test images.
    Test,
}

/// A split of MNIST in memory.
#[derive(Debug)]
pub struct Mnist {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Mnist {
    /// Reads a split from a directory with the MNIST files under their original names.
    pub fn open(folder: impl AsRef<Path>, split: Split) -> Result<Mnist, DataError> {
        let prefix = match split {
            Split::Train => "train",
            Split::Test => "t10k",
        };
        let file = |rest: &str| folder.as_ref().join(format!("{prefix}-{rest}"));
        let images = file("images-idx3-ubyte");
        let labels = file("labels-idx1-ubyte");
        let pixels = read_idx(&images, IMAGES, &[IMAGE_SIDE, IMAGE_SIDE])?;
        let digits = read_idx(&labels, LABELS, &[])?;
        let number = pixels.len() / PIXELS;
        if number != digits.len() {
            let reason = format!("{} labels for {number} images", digits.len());
            return Err(DataError::format(&labels, reason));
        }
        if let Some(position) = digits.iter().position(|&digit| digit > 9) {
            let reason = format!("label {position} is {}, not a digit", digits[position]);
            return Err(DataError::format(&labels, reason));
        }
        Ok(Mnist {
            pixels,
            labels: digits,
        })
    }
}

impl Source for Mnist {
    fn len(&self) -> Option<u64> {
        Some(self.labels.len() as u64)
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        check_index(index, self.labels.len() as u64)?;
        let index = index as usize;
        let pixels = &self.pixels[index * PIXELS..][..PIXELS];
        let normalized = |&grey: &u8| (f32::from(grey) / 255.0 - MEAN) / STD;
        let pixels = pixels.iter().map(normalized);
        let label = i64::from(self.labels[index]);
        Ok(Sample::image(pixels.collect(), label))
    }
}

/// The content of an IDX file whose entries have the given dimensions.
fn read_idx(path: &Path, magic: u32, dims: &[usize]) -> Result<Vec<u8>, DataError> {
    let mut bytes = std::fs::read(path).map_err(|error| explain_missing(path, error))?;
    let content = check_idx(&bytes, magic, dims).map_err(|why| DataError::format(path, why))?;
    Ok(bytes.split_off(content))
}

/// Suggests to unpack the file if only its gzip-compressed form exists.
fn explain_missing(path: &Path, error: std::io::Error) -> DataError {
    let mut packed = path.as_os_str().to_owned();
    packed.push(".gz");
    let packed = PathBuf::from(packed);
    if packed.exists() {
        DataError::format(&packed, "unpack it first: gunzip this file")
    } else {
        DataError::io(path, error)
    }
}

/// Checks the header and returns its length.
fn check_idx(bytes: &[u8], magic: u32, dims: &[usize]) -> Result<usize, String> {
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Err(
            "the file is compressed with gzip: rename it to end in .gz and gunzip it".into(),
        );
    }
    let field = |number: usize| {
        let bytes = bytes.get(4 * number..)?.first_chunk()?;
        Some(u32::from_be_bytes(*bytes))
    };
    let found = field(0).ok_or("the file is too short for an IDX file")?;
    if found != magic {
        return Err(format!(
            "the magic number is {found:#010x}, expected {magic:#010x}"
        ));
    }
    let number = field(1).ok_or("the header is truncated")? as usize;
    for (position, &dim) in dims.iter().enumerate() {
        let found = field(2 + position).ok_or("the header is truncated")? as usize;
        if found != dim {
            return Err(format!("dimension {position} is {found}, expected {dim}"));
        }
    }
    let header = 4 * (2 + dims.len());
    let content = bytes.len() - header;
    let expected = number.saturating_mul(dims.iter().product());
    if content == expected {
        Ok(header)
    } else {
        Err(format!(
            "{number} entries need {expected} bytes, but the file has {content} after the header"
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn idx(magic: u32, sizes: &[u32], content: &[u8]) -> Vec<u8> {
        let header = [magic]
            .into_iter()
            .chain(sizes.iter().copied())
            .flat_map(u32::to_be_bytes);
        header.chain(content.iter().copied()).collect()
    }

    fn images(number: u32) -> Vec<u8> {
        let content: Vec<_> = (0..number as usize * PIXELS).map(|i| i as u8).collect();
        idx(IMAGES, &[number, 28, 28], &content)
    }

    fn open(images: &[u8], labels: &[u8]) -> Result<Mnist, DataError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("t10k-images-idx3-ubyte"), images).unwrap();
        std::fs::write(folder.path().join("t10k-labels-idx1-ubyte"), labels).unwrap();
        Mnist::open(folder.path(), Split::Test)
    }

    #[test]
    fn reads_what_was_written() {
        let mnist = open(&images(3), &idx(LABELS, &[3], &[7, 0, 9])).unwrap();
        assert_eq!(mnist.len(), Some(3));
        let grey = |i: usize| ((2 * PIXELS + i) % 256) as f32 / 255.0;
        let pixel = |i: usize| (grey(i) - MEAN) / STD;
        let expected = Sample::image((0..PIXELS).map(pixel).collect(), 9);
        assert_eq!(mnist.sample(2).unwrap(), expected);
        assert!(matches!(
            mnist.sample(3),
            Err(DataError::OutOfRange { index: 3, len: 3 })
        ));
    }

    #[test]
    fn invalid_files_are_rejected() {
        let labels = idx(LABELS, &[3], &[7, 0, 9]);
        let error = |a: &[u8], b: &[u8]| open(a, b).unwrap_err().to_string();
        assert!(error(&labels, &labels).contains("0x00000801, expected 0x00000803"));
        assert!(error(&images(2), &labels).contains("3 labels for 2 images"));
        assert!(error(&images(3), &idx(LABELS, &[3], &[1, 10, 2])).contains("label 1 is 10"));
        assert!(error(&images(3)[..900], &labels).contains("need 2352 bytes"));
        assert!(error(&idx(IMAGES, &[1, 28, 27], &[]), &labels).contains("dimension 1 is 27"));
        assert!(error(&[0x1f, 0x8b, 8, 0], &labels).contains("gunzip"));
        assert!(error(&[0, 0], &labels).contains("too short"));
    }

    #[test]
    fn a_compressed_file_is_suggested_to_be_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(
            folder.path().join("train-images-idx3-ubyte.gz"),
            [0x1f, 0x8b],
        )
        .unwrap();
        let message = Mnist::open(folder.path(), Split::Train)
            .unwrap_err()
            .to_string();
        assert!(message.contains("unpack it first"), "{message}");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(mut bytes: Vec<u8>, lead in 0usize..3) {
            let prefix = idx(IMAGES, &[1, 28], &[]);
            bytes.splice(0..0, prefix[..4 * lead].iter().copied());
            let _ = check_idx(&bytes, IMAGES, &[28, 28]);
            let _ = check_idx(&bytes, LABELS, &[]);
        }
    }
}
