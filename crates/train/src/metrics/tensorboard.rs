//! Metrics as a TensorBoard event file, with the tags of torchtitan.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{framed, scalars_event, version_event};
use super::record_file::RecordFile;
use super::{MetricSink, StepMetrics, ValidationMetrics};
use crate::{Result, TrainError};

/// A TensorBoard event file with one record per reported step or evaluation.
pub struct TensorBoard(RecordFile);

impl TensorBoard {
    /// Creates a new event file in `folder`; TensorBoard merges the files of resumed runs.
    pub fn create(folder: impl Into<PathBuf>) -> Result<TensorBoard> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
        let path = folder.join(file_name());
        let file = OpenOptions::new().create_new(true).append(true).open(&path);
        let file = file.map_err(TrainError::io(&path))?;
        let mut board = TensorBoard(RecordFile::new(path, file)?);
        board.append(&version_event(wall_time()));
        Ok(board)
    }

    fn append(&mut self, event: &[u8]) {
        self.0.append(&framed(event));
    }
}

impl MetricSink for TensorBoard {
    fn write(&mut self, metrics: &StepMetrics) {
        let scalars = scalars(metrics);
        let named: Vec<(&str, f64)> = scalars.iter().map(|(tag, v)| (tag.as_str(), *v)).collect();
        self.append(&scalars_event(wall_time(), metrics.step, &named));
    }

    fn write_validation(&mut self, metrics: &ValidationMetrics) {
        let scalars = [("validation_metrics/loss", metrics.validation_loss)];
        self.append(&scalars_event(wall_time(), metrics.step, &scalars));
    }
}

/// The scalars of a step. An unknown MFU is omitted.
fn scalars(m: &StepMetrics) -> Vec<(String, f64)> {
    let mut scalars = vec![
        ("loss_metrics/global_avg_loss", m.loss),
        ("grad_norm", m.grad_norm),
        ("lr", m.lr),
        ("throughput(tps)", m.tps),
        ("tflops", m.tflops),
        ("time_metrics/end_to_end(s)", m.seconds),
        ("time_metrics/data_loading(%)", 100.0 * m.data_share),
        ("memory/max_active(GiB)", m.memory_gib()),
    ];
    scalars.extend(m.mfu.map(|mfu| ("mfu(%)", 100.0 * mfu)));
    if let Some(traffic) = m.expert_traffic {
        scalars.extend([
            ("experts/dispatch(s)", traffic.dispatch.seconds),
            ("experts/dispatch(bytes/s)", traffic.dispatch.bandwidth),
            ("experts/combine(s)", traffic.combine.seconds),
            ("experts/combine(bytes/s)", traffic.combine.bandwidth),
        ]);
    }
    let loads = m.expert_loads.iter().flat_map(|load| {
        let tag = |what| format!("experts/layer{}/{what}", load.layer);
        [
            (tag("max_over_mean"), load.imbalance()),
            (tag("dropped(%)"), 100.0 * load.dropped_share()),
        ]
    });
    let scalars = scalars
        .into_iter()
        .map(|(tag, value)| (tag.to_owned(), value));
    scalars.chain(loads).collect()
}

/// Seconds since the Unix epoch.
fn wall_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// `events.out.tfevents.TIME.HOST.PROCESS.0`: TensorBoard finds its files by this name. The time is padded
/// because TensorBoard sorts files by name.
fn file_name() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname");
    let host = host.map_or("localhost".into(), |host| host.trim().replace('/', "-"));
    let (time, process) = (wall_time() as u64, process::id());
    format!("events.out.tfevents.{time:010}.{host}.{process}.0")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::event::FILE_VERSION;
    use super::*;

    /// An independent reader, written from the specifications of record framing, checksums and protobuf.
    mod reader {
        #[derive(Debug, Default, PartialEq)]
        pub struct Event {
            pub wall_time: f64,
            pub step: u64,
            pub file_version: String,
            pub scalars: Vec<(String, f32)>,
        }

        pub fn events(mut file: &[u8]) -> Vec<Event> {
            let mut events = Vec::new();
            while !file.is_empty() {
                let length = take(&mut file, 8);
                assert_eq!(take(&mut file, 4), masked(length).to_le_bytes());
                let data = take(&mut file, u64::from_le_bytes(length.try_into().unwrap()));
                assert_eq!(take(&mut file, 4), masked(data).to_le_bytes());
                events.push(event(data));
            }
            events
        }

        fn event(data: &[u8]) -> Event {
            let mut event = Event::default();
            for (number, value) in fields(data) {
                match (number, value) {
                    (1, Value::Fixed(b)) => {
                        event.wall_time = f64::from_le_bytes(b.try_into().unwrap())
                    }
                    (2, Value::Varint(step)) => event.step = step,
                    (3, Value::Bytes(b)) => {
                        event.file_version = String::from_utf8(b.into()).unwrap()
                    }
                    (5, Value::Bytes(b)) => event.scalars = summary(b),
                    other => panic!("{other:?}"),
                }
            }
            event
        }

        fn summary(data: &[u8]) -> Vec<(String, f32)> {
            let values = fields(data).into_iter().map(|field| match field {
                (1, Value::Bytes(value)) => match fields(value)[..] {
                    [(1, Value::Bytes(tag)), (2, Value::Fixed(number))] => (
                        String::from_utf8(tag.into()).unwrap(),
                        f32::from_le_bytes(number.try_into().unwrap()),
                    ),
                    ref other => panic!("{other:?}"),
                },
                other => panic!("{other:?}"),
            });
            values.collect()
        }

        #[derive(Clone, Copy, Debug)]
        enum Value<'a> {
            Varint(u64),
            Fixed(&'a [u8]),
            Bytes(&'a [u8]),
        }

        fn fields(mut data: &[u8]) -> Vec<(u64, Value<'_>)> {
            let mut fields = Vec::new();
            while !data.is_empty() {
                let key = varint(&mut data);
                let value = match key % 8 {
                    0 => Value::Varint(varint(&mut data)),
                    1 => Value::Fixed(take(&mut data, 8)),
                    2 => {
                        let length = varint(&mut data);
                        Value::Bytes(take(&mut data, length))
                    }
                    5 => Value::Fixed(take(&mut data, 4)),
                    other => panic!("wire type {other}"),
                };
                fields.push((key / 8, value));
            }
            fields
        }

        fn varint(data: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = take(data, 1)[0];
                value += u64::from(byte % 128) << shift;
                if byte < 128 {
                    break;
                }
            }
            value
        }

        fn take<'a>(data: &mut &'a [u8], length: u64) -> &'a [u8] {
            let (taken, rest) = data.split_at(length as usize);
            *data = rest;
            taken
        }

        /// Computed bit by bit, unlike in the writer.
        fn masked(data: &[u8]) -> u32 {
            let mut crc = u32::MAX;
            for &byte in data {
                crc ^= u32::from(byte);
                for _ in 0..8 {
                    crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
                }
            }
            (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
        }
    }

    fn metrics(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 3.25,
            grad_norm: 0.5,
            lr: 3e-4,
            tps: 7282.0,
            tflops: 0.5,
            mfu: (step > 1).then_some(0.25),
            memory_bytes: 3 << 29,
            seconds: 0.75,
            data_share: 0.125,
            ..StepMetrics::default()
        }
    }

    fn written(steps: &[u64]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(folder.path().join("tb")).unwrap();
        for &step in steps {
            board.write(&metrics(step));
        }
        let path = board.0.path().to_owned();
        (folder, path)
    }

    #[test]
    fn an_independent_reader_reads_all_events() {
        let (_folder, path) = written(&[1, 300]);
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        let events = reader::events(&fs::read(&path).unwrap());
        assert_eq!(events[0].file_version, FILE_VERSION);
        assert!(events.iter().all(|event| event.wall_time > 1.7e9));
        let steps: Vec<u64> = events.iter().map(|event| event.step).collect();
        assert_eq!(steps, [0, 1, 300]);
        let expected = [
            ("loss_metrics/global_avg_loss", 3.25),
            ("grad_norm", 0.5),
            ("lr", 3e-4),
            ("throughput(tps)", 7282.0),
            ("tflops", 0.5),
            ("time_metrics/end_to_end(s)", 0.75),
            ("time_metrics/data_loading(%)", 12.5),
            ("memory/max_active(GiB)", 1.5),
            ("mfu(%)", 25.0),
        ];
        let found = |event: &reader::Event| event.scalars.clone();
        let expected = expected.map(|(tag, value)| (tag.to_owned(), value));
        assert_eq!(found(&events[1]), expected[..8]);
        assert_eq!(found(&events[2]), expected);
    }

    /// Reads the file with the TensorBoard package.
    #[test]
    #[ignore = "needs the Python package tensorboard; install it and use --run-ignored all"]
    fn tensorboard_reads_it() {
        const READ: &str = "
import sys
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
for event in EventFileLoader(sys.argv[1]).Load():
    for value in event.summary.value:
        print(event.step, value.tag)
";
        let (_folder, path) = written(&[7]);
        let python = std::env::var("TRAINYARD_PYTHON").unwrap_or("python3".into());
        let output = Command::new(python).args(["-c", READ]).arg(&path).output();
        let output = output.unwrap();
        let (text, errors) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success(), "{errors}");
        assert_eq!(text.lines().count(), 9, "{text}");
        assert!(text.contains("7 loss_metrics/global_avg_loss"), "{text}");
    }
}
