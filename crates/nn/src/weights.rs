//! Saves and loads weights as a safetensors file, the format of Hugging Face.
//!
//! A file holds every parameter of a module in full, under its global name. Loading is strict: names, shapes and
//! dtypes must match, or the error lists the differences. Both directions work tensor by tensor, so that memory never
//! holds a second copy of the model.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::BTreeSet,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    rc::Rc,
};

use safetensors::{
    Dtype, SafeTensorError, View,
    tensor::{Metadata, TensorInfo},
};
use tch::{Device, Kind, TchError, Tensor};
use trainyard_mesh::{Mesh, Region, slice_of};
use trainyard_torch::meta;

use crate::initial_values::{FlatWriter, InitialValues, chunks};
use crate::{Module, NnError, Parameter, Result, dtype, parameter::shape_of};

/// The bytes of the header length at the start of every file.
const PREFIX: u64 = 8;
/// The maximum size of a header, against malformed files.
const MAX_HEADER: u64 = 100_000_000;
/// The number of bytes read at a time; a multiple of every element size.
const CHUNK: usize = 16 << 20;

/// Why a weights file could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// An I/O operation failed.
    #[error("{}: {source}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },

    /// The file is not a valid safetensors file.
    #[error("{}: not a safetensors file: {reason}", path.display())]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },

    /// The safetensors library could not write the file.
    #[error("{}: {source}", path.display())]
    Serialize {
        /// The path of the file.
        path: PathBuf,
        /// The underlying error.
        source: SafeTensorError,
    },

    /// The names in the file differ from those of the model.
    #[error(
        "{}: not this model's weights: missing [{}], unexpected [{}]",
        path.display(), missing.join(", "), unexpected.join(", ")
    )]
    Names {
        /// The path of the file.
        path: PathBuf,
        /// Names in the model but not in the file.
        missing: Vec<String>,
        /// Names in the file but not in the model.
        unexpected: Vec<String>,
    },

    /// The shape of a tensor in the file differs from the model's.
    #[error("{}: {name} has shape {found:?}, expected {expected:?}", path.display())]
    Shape {
        /// The path of the file.
        path: PathBuf,
        /// The name of the tensor.
        name: String,
        /// The model's shape.
        expected: Vec<usize>,
        /// The file's shape.
        found: Vec<usize>,
    },

    /// The dtype of a tensor in the file differs from the model's.
    #[error(
        "{}: {name} is {found}, expected {expected}: convert the file or build the model with its dtype",
        path.display()
    )]
    Kind {
        /// The path of the file.
        path: PathBuf,
        /// The name of the tensor.
        name: String,
        /// The model's dtype.
        expected: Dtype,
        /// The file's dtype.
        found: Dtype,
    },

    /// Safetensors does not support a dtype.
    #[error("{name}: safetensors does not support the dtype {kind:?}")]
    UnknownKind {
        /// The name of the parameter.
        name: String,
        /// The unsupported dtype.
        kind: Kind,
    },

    /// This rank holds only a shard of a parameter.
    #[error(
        "{name}: this rank holds a shard {held:?} of {shape:?} ({layout}): gather it first, or use a sharded checkpoint"
    )]
    NotGathered {
        /// The name of the parameter.
        name: String,
        /// The shape of the shard.
        held: Vec<usize>,
        /// The global shape.
        shape: Vec<usize>,
        /// The layout of the parameter.
        layout: String,
    },
}

/// Writes every parameter of `module` to `path`. The write is atomic: the file appears complete or not at all.
pub fn save(path: impl AsRef<Path>, module: &dyn Module) -> Result<()> {
    let path = path.as_ref();
    let parameters = module.parameters();
    let failure = RefCell::new(None);
    let views = parameters
        .iter()
        .map(|parameter| Ok((parameter.name(), ParameterView::new(parameter, &failure)?)))
        .collect::<Result<Vec<_>>>()?;

    let partial = partial_name(path);
    let written = safetensors::serialize_to_file(views, None, &partial)
        .map_err(|source| serialize_error(path, source).into())
        .and_then(|()| match failure.take() {
            Some(error) => Err(TchError::into(error)),
            None => fs::rename(&partial, path).map_err(|source| file_error(path, source).into()),
        });
    if written.is_err() {
        // Report the first error, not one of the cleanup.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Loads every parameter of `module` from `path`.
///
/// Checks everything before changing anything.
pub fn load(path: impl AsRef<Path>, module: &dyn Module) -> Result<()> {
    load_from(path.as_ref(), module, |parameter| {
        require_full(parameter)?;
        Ok(Region::full(parameter.shape()))
    })
}

/// Loads the shard of each parameter that `rank` of `mesh` holds according to the parameter's layout. Skips
/// parameters without memory, which other ranks hold.
pub fn load_sharded(
    path: impl AsRef<Path>,
    module: &dyn Module,
    mesh: &Mesh,
    rank: usize,
) -> Result<()> {
    load_from(path.as_ref(), module, |parameter| {
        let held = slice_of(parameter.shape(), &parameter.layout(), mesh, rank);
        match held {
            Ok(slice) if slice.region.lengths == shape_of(parameter.tensor()) => Ok(slice.region),
            _ => Err(not_gathered(parameter)),
        }
    })
}

fn load_from(
    path: &Path,
    module: &dyn Module,
    region_of: impl Fn(&Parameter) -> Result<Region>,
) -> Result<()> {
    let file = Rc::new(WeightsFile::open(path)?);
    let parameters = module.parameters();
    file.compare_names(&parameters)?;
    let planned = parameters
        .iter()
        .map(|p| Ok((p, region_of(p)?, file.compare(p)?.clone())))
        .collect::<Result<Vec<_>>>()?;
    let held = planned
        .into_iter()
        .filter(|(p, _, _)| !meta::is_meta(p.tensor()));
    for (parameter, region, info) in held {
        parameter.initialize(FileValues {
            file: Rc::clone(&file),
            kind: parameter.kind(),
            info,
            region,
        })?;
    }
    Ok(())
}

/// A parameter as the safetensors library reads it for writing.
struct ParameterView<'a> {
    parameter: &'a Parameter,
    dtype: Dtype,
    /// The trait's methods cannot return errors, so the first error is stored here.
    failure: &'a RefCell<Option<TchError>>,
}

impl<'a> ParameterView<'a> {
    fn new(
        parameter: &'a Parameter,
        failure: &'a RefCell<Option<TchError>>,
    ) -> Result<ParameterView<'a>> {
        require_full(parameter)?;
        Ok(ParameterView {
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

impl View for ParameterView<'_> {
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

/// An open weights file.
struct WeightsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// The offset of the tensor data.
    base: u64,
}

impl WeightsFile {
    fn open(path: &Path) -> Result<WeightsFile> {
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
                "its header claims {length} bytes, but the file has {size}"
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
                "the file has {size} bytes, but its header describes {expected}"
            )))?;
        }
        Ok(WeightsFile {
            path: path.to_owned(),
            file,
            metadata,
            base,
        })
    }

    /// Reads bytes at this offset in the tensor data.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(bytes, self.base + offset as u64);
        Ok(read.map_err(|source| file_error(&self.path, source))?)
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
}

/// The values of a tensor of a file, as initial values of a parameter.
struct FileValues {
    file: Rc<WeightsFile>,
    info: TensorInfo,
    /// The region of the tensor that this rank holds.
    region: Region,
    kind: Kind,
}

impl InitialValues for FileValues {
    fn write(&self, elements: Range<usize>, target: &Tensor) -> Result<()> {
        let width = self.kind.elt_size_in_bytes();
        let mut writer = FlatWriter::new(target);
        let mut append = |bytes: &[u8]| -> Result<()> {
            let length = (bytes.len() / width) as i64;
            writer.append(&Tensor::f_from_data_size(bytes, &[length], self.kind)?)
        };
        let mut bytes = Vec::new();
        let runs = self.region.runs_within(&self.info.shape, elements);
        for chunk in runs.flat_map(|run| chunks(run, CHUNK / width)) {
            let at = bytes.len();
            bytes.resize(at + chunk.len() * width, 0);
            let offset = self.info.data_offsets.0 + chunk.start * width;
            self.file.read(offset, &mut bytes[at..])?;
            if bytes.len() >= CHUNK {
                append(&bytes)?;
                bytes.clear();
            }
        }
        append(&bytes)
    }
}

fn require_full(parameter: &Parameter) -> Result<()> {
    if shape_of(parameter.tensor()) == parameter.shape() {
        Ok(())
    } else {
        Err(not_gathered(parameter))
    }
}

fn not_gathered(parameter: &Parameter) -> NnError {
    let error = WeightsError::NotGathered {
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
