//! Those who should not be here.
