//! Weights in a safetensors file, the format Hugging Face uses.
//!
//! A file holds every parameter of a module whole, under its global name. Reading is strict: the
//! same names, shapes and kinds, or an error that says what differs. Both ways work tensor by
//! tensor, so that no second copy of the model is ever in memory.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use safetensors::{
    Dtype, SafeTensorError, View,
    tensor::{Metadata, TensorInfo},
};
use tch::{Device, Kind, TchError, Tensor};
use trainyard_mesh::{Mesh, Region, slice_of};
use trainyard_torch::meta;

use crate::{Module, NnError, Parameter, Result, dtype, parameter::shape_of};

/// Bytes of the header's own length, which every file begins with.
const PREFIX: u64 = 8;
/// No honest header is larger.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes read at a time; a multiple of every element's size.
const CHUNK: usize = 16 << 20;

/// Why a file of weights could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },

    /// The file is not in the format.
    #[error("{}: not a safetensors file: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The file could not be written in the format.
    #[error("{}: {source}", path.display())]
    Serialize {
        /// The file.
        path: PathBuf,
        /// Why.
        source: SafeTensorError,
    },

    /// The names in the file are not those of the model.
    #[error(
        "{}: not this model's weights: missing [{}], unexpected [{}]",
        path.display(), missing.join(", "), unexpected.join(", ")
    )]
    Names {
        /// The file.
        path: PathBuf,
        /// In the model but not in the file.
        missing: Vec<String>,
        /// In the file but not in the model.
        unexpected: Vec<String>,
    },

    /// A tensor in the file has another shape.
    #[error("{}: {name} has shape {found:?}, expected {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The model's shape.
        expected: Vec<usize>,
        /// The file's shape.
        found: Vec<usize>,
    },

    /// A tensor in the file has another kind.
    #[error(
        "{}: {name} is {found}, expected {expected}: convert the file or build the model in its kind",
        path.display()
    )]
    Kind {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The model's kind.
        expected: Dtype,
        /// The file's kind.
        found: Dtype,
    },

    /// The format has no word for a kind.
    #[error("{name}: the format has no kind {kind:?}")]
    UnknownKind {
        /// The parameter.
        name: String,
        /// Its kind.
        kind: Kind,
    },

    /// This rank holds only part of a parameter.
    #[error(
        "{name}: this rank holds {held:?} of {shape:?} ({layout}): gather it first, or use a sharded checkpoint"
    )]
    NotWhole {
        /// The parameter.
        name: String,
        /// What is held.
        held: Vec<usize>,
        /// The global shape.
        shape: Vec<usize>,
        /// How the mesh divides it.
        layout: String,
    },
}

/// Writes every parameter of `module` to `path`. The file appears whole or not at all.
pub fn save(path: impl AsRef<Path>, module: &dyn Module) -> Result<()> {
    let path = path.as_ref();
    let parameters = module.parameters();
    let failure = RefCell::new(None);
    let views = parameters
        .iter()
        .map(|parameter| Ok((parameter.name(), Saved::new(parameter, &failure)?)))
        .collect::<Result<Vec<_>>>()?;

    let partial = partial_name(path);
    let written = safetensors::serialize_to_file(views, None, &partial)
        .map_err(|source| serialize_error(path, source).into())
        .and_then(|()| match failure.take() {
            Some(error) => Err(TchError::into(error)),
            None => fs::rename(&partial, path).map_err(|source| file_error(path, source).into()),
        });
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Fills every parameter of `module` from `path`.
///
/// Everything is compared before anything is changed.
pub fn load(path: impl AsRef<Path>, module: &dyn Module) -> Result<()> {
    fill_from(path.as_ref(), module, |parameter| {
        require_whole(parameter)?;
        Ok(Region::whole(parameter.shape()))
    })
}

/// The same where `rank` of `mesh` holds a part of each parameter, as its layout says. Parameters
/// without memory, which other ranks hold, are left as they are.
pub fn load_part(
    path: impl AsRef<Path>,
    module: &dyn Module,
    mesh: &Mesh,
    rank: usize,
) -> Result<()> {
    fill_from(path.as_ref(), module, |parameter| {
        let held = slice_of(parameter.shape(), &parameter.layout(), mesh, rank);
        match held {
            Ok(slice) if slice.region.lengths == shape_of(parameter.tensor()) => Ok(slice.region),
            _ => Err(not_whole(parameter)),
        }
    })
}

fn fill_from(
    path: &Path,
    module: &dyn Module,
    region_of: impl Fn(&Parameter) -> Result<Region>,
) -> Result<()> {
    let stored = Stored::open(path)?;
    let parameters = module.parameters();
    stored.compare_names(&parameters)?;
    let planned = parameters
        .iter()
        .map(|p| Ok((p, region_of(p)?, stored.compare(p)?)))
        .collect::<Result<Vec<_>>>()?;
    let held = planned
        .into_iter()
        .filter(|(p, _, _)| !meta::is_meta(p.tensor()));
    for (parameter, region, info) in held {
        stored.fill(parameter, &region, info)?;
    }
    Ok(())
}

/// A parameter about to be written.
struct Saved<'a> {
    parameter: &'a Parameter,
    dtype: Dtype,
    /// The format's trait cannot fail, so the first failure waits here.
    failure: &'a RefCell<Option<TchError>>,
}

impl<'a> Saved<'a> {
    fn new(parameter: &'a Parameter, failure: &'a RefCell<Option<TchError>>) -> Result<Saved<'a>> {
        require_whole(parameter)?;
        Ok(Saved {
            parameter,
            dtype: dtype_of(parameter)?,
            failure,
        })
    }

    fn bytes(&self) -> std::result::Result<Vec<u8>, TchError> {
        let tensor = self.parameter.tensor().f_detach()?;
        let tensor = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0; self.data_len()];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        Ok(bytes)
    }
}

impl View for Saved<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.parameter.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes()
            .unwrap_or_else(|error| {
                self.failure.borrow_mut().get_or_insert(error);
                vec![0; self.data_len()]
            })
            .into()
    }

    fn data_len(&self) -> usize {
        self.parameter.num_elements() as usize * self.parameter.kind().elt_size_in_bytes()
    }
}

/// An open file of weights.
struct Stored<'a> {
    path: &'a Path,
    file: File,
    metadata: Metadata,
    /// Where the elements begin.
    base: u64,
}

impl<'a> Stored<'a> {
    fn open(path: &'a Path) -> Result<Stored<'a>> {
        let failed = |source| file_error(path, source);
        let malformed = |reason: String| WeightsError::Format {
            path: path.to_owned(),
            reason,
        };
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut length = [0; PREFIX as usize];
        file.read_exact_at(&mut length, 0).map_err(failed)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER.min(size) {
            return Err(malformed(format!(
                "a header of {length} bytes in a file of {size}"
            )))?;
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, PREFIX).map_err(failed)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| malformed(error.to_string()))?;

        let base = PREFIX + length;
        let expected = base + metadata.data_len() as u64;
        if size != expected {
            return Err(malformed(format!(
                "{size} bytes where its header speaks of {expected}"
            )))?;
        }
        Ok(Stored {
            path,
            file,
            metadata,
            base,
        })
    }

    fn compare_names(&self, parameters: &[Parameter]) -> Result<()> {
        let wanted: BTreeSet<String> = parameters.iter().map(|p| p.name().to_owned()).collect();
        let found: BTreeSet<String> = self.metadata.tensors().into_keys().collect();
        if wanted == found {
            return Ok(());
        }
        Err(WeightsError::Names {
            path: self.path.to_owned(),
            missing: wanted.difference(&found).cloned().collect(),
            unexpected: found.difference(&wanted).cloned().collect(),
        })?
    }

    fn compare(&self, parameter: &Parameter) -> Result<&TensorInfo> {
        let (path, name) = (self.path.to_owned(), parameter.name().to_owned());
        let Some(info) = self.metadata.info(&name) else {
            return Err(WeightsError::Names {
                path,
                missing: vec![name],
                unexpected: Vec::new(),
            })?;
        };
        let expected = dtype_of(parameter)?;
        if info.shape != parameter.shape() {
            return Err(WeightsError::Shape {
                path,
                name,
                expected: parameter.shape().to_vec(),
                found: info.shape.clone(),
            })?;
        }
        if info.dtype != expected {
            return Err(WeightsError::Kind {
                path,
                name,
                expected,
                found: info.dtype,
            })?;
        }
        Ok(info)
    }

    fn fill(&self, parameter: &Parameter, region: &Region, info: &TensorInfo) -> Result<()> {
        let flat = parameter.tensor().f_detach()?.f_view(-1i64)?;
        let width = parameter.kind().elt_size_in_bytes();
        let mut filled = 0;
        let mut copy = |bytes: &[u8]| -> Result<()> {
            let length = (bytes.len() / width) as i64;
            let values = Tensor::f_from_data_size(bytes, &[length], parameter.kind())?;
            flat.f_narrow(0, filled, length)?.f_copy_(&values)?;
            filled += length;
            Ok(())
        };
        let mut bytes = Vec::new();
        for run in region.runs(parameter.shape()) {
            for start in (run.start..run.end).step_by(CHUNK / width) {
                let end = run.end.min(start + CHUNK / width);
                let (at, held) = (bytes.len(), (end - start) * width);
                bytes.resize(at + held, 0);
                let offset = self.base + (info.data_offsets.0 + start * width) as u64;
                self.file
                    .read_exact_at(&mut bytes[at..], offset)
                    .map_err(|source| file_error(self.path, source))?;
                if bytes.len() >= CHUNK {
                    copy(&bytes)?;
                    bytes.clear();
                }
            }
        }
        copy(&bytes)
    }
}

fn require_whole(parameter: &Parameter) -> Result<()> {
    match shape_of(parameter.tensor()) == parameter.shape() {
        true => Ok(()),
        false => Err(not_whole(parameter)),
    }
}

fn not_whole(parameter: &Parameter) -> NnError {
    let error = WeightsError::NotWhole {
        name: parameter.name().to_owned(),
        held: shape_of(parameter.tensor()),
        shape: parameter.shape().to_vec(),
        layout: parameter.layout().to_string(),
    };
    error.into()
}

fn dtype_of(parameter: &Parameter) -> Result<Dtype> {
    let kind = parameter.kind();
    let unknown = || WeightsError::UnknownKind {
        name: parameter.name().to_owned(),
        kind,
    };
    Ok(dtype::dtype_of(kind).ok_or_else(unknown)?)
}

fn partial_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

fn file_error(path: &Path, source: io::Error) -> WeightsError {
    WeightsError::File {
        path: path.to_owned(),
        source,
    }
}

fn serialize_error(path: &Path, source: SafeTensorError) -> WeightsError {
    WeightsError::Serialize {
        path: path.to_owned(),
        source,
    }
}
