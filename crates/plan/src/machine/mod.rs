//! One machine as it was measured, and what a step of the real code takes on it.
//!
//! A cluster's data sheet prices strategies that nobody has run. Where the machine is at hand there is a
//! better way: let it run the operators of the model and every collective a few times, and price the dry
//! run of a strategy, operator by operator, with what was seen. The dry run is the code that trains, so
//! nothing is left out or counted twice.

mod line;
mod meetings;
mod price;
mod rates;

pub use meetings::{Message, Waits};
pub use price::{DryRun, Moved, Priced, price, price_pipeline};
pub use rates::{Machine, MachineError, Rate, Stepped};
