//! Exit codes with which a worker says that a restart would not help.

use crate::ExitStatus;

/// The job stopped because the loss or the gradients were not usable (`EX_DATAERR` of sysexits.h).
pub const BAD_VALUES: u8 = 65;
/// The job rejected what it was started with, such as a checkpoint of another job (`EX_CONFIG` of sysexits.h).
pub const REJECTED: u8 = 78;

impl ExitStatus {
    /// Whether a restart would not help.
    pub fn is_final(self) -> bool {
        [BAD_VALUES, REJECTED].contains(&self.exit_code()) && matches!(self, ExitStatus::Exited(_))
    }
}
