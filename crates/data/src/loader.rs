//! The data loader: threads that prefetch batches for the training loop.
//!
//! Micro-batches are numbered in the order of use. Thread t of n makes batches t, t + n, t + 2n and so on,
//! and sends them into a bounded channel of its own; the reader receives from the channels in turn. The
//! order is deterministic and the threads share no state. When the loader is dropped, the channels close
//! and the threads exit.
//!
//! A thread collates a batch in pinned memory and copies it to the device on a stream of its own, so that copies run
//! beside the computation. The reader makes its stream wait for the copy; the host does not wait.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use tch::Device;
use trainyard_torch::device::{self, Event, Stream};

use crate::{Batch, DataError, Order, SampleStream, Sampler, Source};

/// Options of a [`Loader`].
#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    /// Number of loader threads.
    pub num_threads: usize,
    /// Batches that each thread prefetches.
    pub prefetch: usize,
    /// The device of the batches.
    pub device: Device,
    /// The order of a finite source.
    pub order: Order,
    /// The first step to load.
    pub first_step: u64,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        LoaderOptions {
            num_threads: 1,
            prefetch: 2,
            device: Device::Cpu,
            order: Order::Sequential,
            first_step: 0,
        }
    }
}

/// A batch that is being copied to the device.
struct Copied {
    batch: Batch,
    done: Event,
}

impl Copied {
    /// The batch, for the current stream of this thread.
    fn wait(self, device: Device) -> Result<Batch, DataError> {
        let stream = Stream::current(device)?;
        stream.wait(&self.done)?;
        for tensor in [&self.batch.inputs, &self.batch.targets] {
            stream.keep(tensor)?;
        }
        Ok(self.batch)
    }
}

/// An endless iterator over the micro-batches of one rank. It ends after the first error.
pub struct Loader {
    channels: Vec<Receiver<Result<Copied, DataError>>>,
    device: Device,
    threads: Vec<JoinHandle<()>>,
    next: usize,
}

impl Loader {
    /// Starts threads that load the batches of data-parallel rank `rank`.
    pub fn new(
        source: Arc<dyn Source>,
        sampler: Sampler,
        rank: usize,
        options: LoaderOptions,
    ) -> Result<Loader, DataError> {
        if source.is_empty() {
            return Err(DataError::Setting("the dataset has no samples".into()));
        }
        let plan = Plan {
            samples: SampleStream {
                source,
                order: options.order,
                device: options.device,
            },
            sampler,
            rank: rank as u64,
            first_step: options.first_step,
        };
        plan.positions(0)?; // reports an invalid rank here rather than in a thread
        let num_threads = options.num_threads.max(1);
        let mut loader = Loader {
            channels: Vec::with_capacity(num_threads),
            device: options.device,
            threads: Vec::with_capacity(num_threads),
            next: 0,
        };
        for thread in 0..num_threads {
            let (sender, receiver) = sync_channel(options.prefetch.max(1));
            let plan = plan.clone();
            let work = move || plan.feed(&sender, thread as u64, num_threads as u64);
            let handle = std::thread::Builder::new()
                .name(format!("loader-{thread}"))
                .spawn(work)
                .map_err(|error| {
                    DataError::Setting(format!("cannot start data loader thread {thread}: {error}"))
                })?;
            loader.channels.push(receiver);
            loader.threads.push(handle);
        }
        Ok(loader)
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let channel = self.channels.get(self.next)?;
        let copied = channel.recv().unwrap_or(Err(DataError::WorkerLost));
        let batch = copied.and_then(|copied| copied.wait(self.device));
        self.next = (self.next + 1) % self.channels.len();
        if batch.is_err() {
            self.channels.clear();
        }
        Some(batch)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // The threads exit when their channels close, so close the channels before joining.
        self.channels.clear();
        for thread in self.threads.drain(..) {
            // A panic was already reported to the reader as `WorkerLost`.
            let _ = thread.join();
        }
    }
}

/// Maps batch numbers to samples; every thread has a copy.
#[derive(Clone)]
struct Plan {
    samples: SampleStream,
    sampler: Sampler,
    rank: u64,
    first_step: u64,
}

impl Plan {
    /// Makes every `stride`th batch from number `start` on, until the channel closes or a batch fails.
    fn feed(&self, sender: &SyncSender<Result<Copied, DataError>>, start: u64, stride: u64) {
        let stream = device::set_current(self.samples.device)
            .and_then(|()| Stream::from_pool(self.samples.device));
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return drop(sender.send(Err(error.into()))),
        };
        let mut number = start;
        loop {
            let copied = self.copied(number, &stream);
            let failed = copied.is_err();
            if sender.send(copied).is_err() || failed {
                return;
            }
            number += stride;
        }
    }

    /// Makes a batch and starts to copy it on `stream`.
    fn copied(&self, number: u64, stream: &Stream) -> Result<Copied, DataError> {
        let positions = self.positions(number)?;
        let batch = stream.scope(|| self.samples.batch(positions))??;
        let done = stream.record()?;
        Ok(Copied { batch, done })
    }

    fn positions(&self, number: u64) -> Result<std::ops::Range<u64>, DataError> {
        let microbatches = self.sampler.num_microbatches();
        let step = self.first_step.saturating_add(number / microbatches);
        self.sampler
            .positions(step, number % microbatches, self.rank)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::Sample;

    /// Sequences that contain their index; can be configured to fail or panic at an index.
    #[derive(Default)]
    struct Counting {
        len: Option<u64>,
        fails_at: Option<u64>,
        panics_at: Option<u64>,
        made: AtomicU64,
    }

    impl Source for Counting {
        fn len(&self) -> Option<u64> {
            self.len
        }

        fn sample(&self, index: u64) -> Result<Sample, DataError> {
            self.made.fetch_add(1, Ordering::Relaxed);
            assert_ne!(Some(index), self.panics_at, "panic requested by the test");
            if self.fails_at == Some(index) {
                Err(DataError::OutOfRange { index, len: index })
            } else {
                Ok(Sample::from_sequence(&[index as i64, 0]))
            }
        }
    }

    fn loader(source: Counting, sampler: Sampler, rank: usize, options: LoaderOptions) -> Loader {
        Loader::new(Arc::new(source), sampler, rank, options).unwrap()
    }

    fn inputs(batch: Result<Batch, DataError>) -> Vec<i64> {
        let inputs = batch.unwrap().inputs.flatten(0, -1);
        Vec::try_from(inputs).unwrap()
    }

    #[test]
    fn the_order_does_not_depend_on_the_number_of_threads() {
        let sampler = Sampler::new(12, 2, 3).unwrap();
        for num_threads in [1, 2, 5] {
            let options = LoaderOptions {
                num_threads,
                first_step: 4,
                ..LoaderOptions::default()
            };
            let loader = loader(Counting::default(), sampler, 1, options);
            let seen: Vec<_> = loader.take(9).map(inputs).collect();
            let expected: Vec<_> = (0..9u64)
                .map(|n| sampler.positions(4 + n / 3, n % 3, 1).unwrap())
                .map(|positions| positions.map(|p| p as i64).collect::<Vec<_>>())
                .collect();
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn the_samples_of_a_step_do_not_depend_on_the_number_of_ranks() {
        let step = |ranks: usize, microbatches: usize| {
            let sampler = Sampler::new(24, ranks, microbatches).unwrap();
            let options = LoaderOptions {
                order: Order::Shuffled { seed: 3 },
                first_step: 7,
                ..LoaderOptions::default()
            };
            let source = || Counting {
                len: Some(50),
                ..Counting::default()
            };
            (0..ranks)
                .flat_map(|rank| loader(source(), sampler, rank, options).take(microbatches))
                .flat_map(inputs)
                .collect::<Vec<_>>()
        };
        let reference = step(1, 1);
        for (ranks, microbatches) in [(1, 4), (2, 1), (3, 2), (4, 3), (8, 1)] {
            assert_eq!(step(ranks, microbatches), reference);
        }
    }

    #[test]
    fn errors_reach_the_reader_in_order() {
        let source = Counting {
            fails_at: Some(5),
            ..Counting::default()
        };
        let options = LoaderOptions {
            num_threads: 3,
            ..LoaderOptions::default()
        };
        let mut loader = loader(source, Sampler::new(1, 1, 1).unwrap(), 0, options);
        for expected in 0..5 {
            assert_eq!(inputs(loader.next().unwrap()), [expected]);
        }
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(error, DataError::OutOfRange { index: 5, .. }));
        assert!(loader.next().is_none());
    }

    #[test]
    fn a_panic_in_a_source_becomes_an_error() {
        let source = Counting {
            panics_at: Some(1),
            ..Counting::default()
        };
        let sampler = Sampler::new(1, 1, 1).unwrap();
        let mut loader = loader(source, sampler, 0, LoaderOptions::default());
        assert!(loader.next().unwrap().is_ok());
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(error, DataError::WorkerLost));
        assert!(loader.next().is_none());
    }

    #[test]
    fn dropping_ends_the_threads_and_prefetch_is_bounded() {
        let source = Arc::new(Counting::default());
        let options = LoaderOptions {
            num_threads: 2,
            prefetch: 3,
            ..LoaderOptions::default()
        };
        let sampler = Sampler::new(1, 1, 1).unwrap();
        let mut loader = Loader::new(source.clone(), sampler, 0, options).unwrap();
        loader.next().unwrap().unwrap();
        drop(loader);
        assert_eq!(
            Arc::strong_count(&source),
            1,
            "a thread still holds the source"
        );
        // One was read, three wait in each channel, and each thread may have made two more.
        assert!(source.made.load(Ordering::Relaxed) <= 1 + 2 * (3 + 2));
    }

    #[test]
    fn invalid_ranks_and_empty_sources_are_rejected() {
        let sampler = Sampler::new(2, 2, 1).unwrap();
        let is_rejected = |source: Counting, rank| {
            Loader::new(Arc::new(source), sampler, rank, LoaderOptions::default()).is_err()
        };
        assert!(is_rejected(Counting::default(), 2));
        let empty = Counting {
            len: Some(0),
            ..Counting::default()
        };
        assert!(is_rejected(empty, 0));
    }
}
