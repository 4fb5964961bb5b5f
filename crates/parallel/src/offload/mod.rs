//! Offload of optimizer moments and master weights to files, for models whose states do not fit in memory.
//!
//! An optimizer uses its states once per step, in a known order. So the states of the next parameters are read, and
//! those of the previous ones written, while the current ones are updated. Memory holds only a few staging buffers,
//! and a disk that is fast enough costs no time.
//!
//! ```
//! use trainyard_parallel::offload::{Record, Spill};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = std::env::temp_dir().join(format!("trainyard-offload-{}", std::process::id()));
//!
//! // Two moments for each of four parameters, and three buffers: read, in use, written.
//! let records = vec![Record::of(tch::Kind::Float, [1000, 1000]); 4];
//! let mut spill = Spill::create(&folder, 0, records, 3)?;
//! spill.read_ahead(0)?;
//! for parameter in 0..4 {
//!     if parameter + 1 < 4 {
//!         spill.read_ahead(parameter + 1)?;
//!     }
//!     let moments = spill.take(parameter)?;
//!     let _ = moments[0].shallow_clone().g_add_scalar_(1.0);
//!     spill.write_behind(moments)?;
//! }
//! spill.flush()?;
//! println!("{:.0} % of the I/O overlapped computation", 100.0 * spill.overlap());
//! # drop(spill);
//! # std::fs::remove_dir(&folder)?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Spill`]: the file, its staging buffers and its I/O threads.
//! - [`Record`] and [`TensorSpec`]: the unit of I/O, and its layout.
//! - [`Staged`]: a record in a staging buffer.
//! - [`Counters`]: bytes moved, I/O time and overlap.
//! - [`OffloadError`]: a full disk, a corrupt record or an I/O error, with file and offset.

mod counters;
mod error;
mod file;
mod pipeline;
mod queue;
mod record;
mod spill;
mod staging;

pub use counters::Counters;
pub use error::{Corruption, OffloadError, Operation, Result};
pub use record::{Record, TensorSpec};
pub use spill::Spill;
pub use staging::Staged;
