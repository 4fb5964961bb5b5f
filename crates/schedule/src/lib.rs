//! Pipeline schedules as data: what each rank does, in which order, decided before anything runs.
//!
//! A model is cut into stages, a batch into micro-batches. A [`Schedule`] lists for every rank the
//! [`Action`]s it takes, one after the other; when it takes them follows from what they wait for. So a
//! schedule can be checked ([`Schedule::check`]), timed under given costs ([`simulate`]) and drawn
//! without a model. [`Schedule::program`] adds messages, gathering and reductions, and the executor has
//! nothing left to decide.
//!
//! ```
//! use trainyard_schedule::{Costs, Kind, simulate};
//!
//! let schedule = Kind::OneForwardOneBackward.build(4, 8, 1)?;
//! let timeline = simulate(&schedule, &Costs::uniform(1.0, 1.0, 1.0))?;
//! assert_eq!(timeline.bubble(), 3.0 * (1.0 + 2.0)); // (ranks - 1) · (forward + backward)
//! assert_eq!(timeline.most_in_flight(), [4, 3, 2, 1]);
//! # Ok::<(), trainyard_schedule::ScheduleError>(())
//! ```

mod action;
mod check;
mod csv;
mod draw;
mod error;
mod kind;
mod make;
mod measured;
mod program;
mod schedule;
mod simulate;

pub use action::{Action, Task, Work};
pub use draw::to_svg;
pub use error::ScheduleError;
pub use kind::Kind;
pub use program::{Instruction, Message, Program, Reductions, Sharing};
pub use schedule::Schedule;
pub use simulate::{Costs, Span, Timeline, simulate};
