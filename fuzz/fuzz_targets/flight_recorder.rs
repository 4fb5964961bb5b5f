//! Arbitrary bytes as a Flight Recorder dump: it is accepted or rejected without a panic, within the memory
//! bound. To reach the code behind the first bytes, every input is also tried as a pickle. What two ranks with
//! the same dump wait for is found without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_fuzz::bounded;
use trainyard_trace::{FlightRecorder, diagnose};

/// The first bytes of PyTorch's pickles: protocol 2.
const PROTOCOL: [u8; 2] = [0x80, 2];

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    if !bytes.starts_with(&PROTOCOL) {
        read(&[&PROTOCOL, bytes].concat());
    }
});

fn read(bytes: &[u8]) {
    let mut recorder = None;
    bounded(bytes.len(), || {
        recorder = FlightRecorder::parse(bytes, Some(0)).ok();
    });
    if let Some(recorder) = recorder {
        let other = FlightRecorder {
            rank: recorder.rank.wrapping_add(1),
            ..recorder.clone()
        };
        let _ = diagnose(&[recorder, other]);
    }
}
