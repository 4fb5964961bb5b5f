//! State kept in files: optimiser moments and master weights that memory has no room for.
//!
//! An optimiser uses its state once a step, in an order known beforehand. So the state of the next
//! parameters can be read while these are updated, and that of the last ones be written: memory
//! holds a few staging buffers instead of everything, and a disk that is fast enough costs no time.
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
//! println!("{:.0} % of it was hidden", 100.0 * spill.overlap());
//! # drop(spill);
//! # std::fs::remove_dir(&folder)?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Spill`]: the file, its buffers and its threads.
//! - [`Record`] and [`Part`]: what is moved together, and how it is laid out.
//! - [`Staged`]: a record while it is in memory.
//! - [`Counters`]: bytes, time, and how much of it was hidden.
//! - [`OffloadError`]: a full disk, a torn record, a refusal, each with its file and place.

mod counters;
mod error;
mod file;
mod pipeline;
mod queue;
mod record;
mod spill;
mod staging;

pub use counters::Counters;
pub use error::{OffloadError, Operation, Result, Tear};
pub use record::{Part, Record};
pub use spill::Spill;
pub use staging::Staged;
