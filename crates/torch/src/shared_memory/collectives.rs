//! The collectives, as rounds. Sums are taken in the order of ranks, so that results do not depend on the transport.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tch::{Device, Tensor};
use trainyard_trace::CollectiveKind;

use super::SharedMemory;
use super::rounds::{Failure, Rounds};
use super::segment::SLOT_BYTES;
use crate::bytes;
use crate::direct_collectives::{add_in_rank_order, error_text, shard, slice};
use crate::sockets::Sockets;

/// The members of a group, for one collective.
pub(crate) struct SharedGroup {
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) sockets: Arc<Sockets>,
    pub(crate) sequence: u64,
}

impl SharedGroup {
    /// Every rank's `tensor` becomes the sum over ranks, times `scale`.
    pub(crate) fn all_reduce(&self, tensor: &Tensor, scale: Option<f64>) -> Result<(), Failure> {
        let rounds = self.rounds(CollectiveKind::AllReduce);
        let flat = tensor.f_view(-1).map_err(error_text)?;
        let num_elements = flat.numel() as i64;
        let part = self.part_elements(&flat);
        let chunk_of = |rank: usize, index: i64| {
            let shard = shard(num_elements, rank, self.size());
            chunk(&shard, index, part)
        };
        let longest = shard(num_elements, 0, self.size());
        let num_chunks = num_chunks(longest.end - longest.start, part);
        let send = |index| self.send_parts(&rounds, &flat, |peer| chunk_of(peer, index));
        send(0)?;
        for index in 0..num_chunks {
            let own = chunk_of(self.index(), index);
            rounds.read(|slots, _| {
                rounds.write(0, |slot| {
                    let own = slice(&flat, own)?;
                    let total = view(slot, &own);
                    self.sum(slots, &own, &total, &total, scale)?;
                    self.count_sent(num_bytes(&own) * self.num_peers());
                    bytes::copy_in(&own, 0, &slot[..num_bytes(&own)]).map_err(io_text)
                })
            })?;
            if index + 1 < num_chunks {
                send(index + 1)?;
            }
            rounds.read(|slots, _| {
                self.peers().try_for_each(|peer| {
                    self.receive(&slice(&flat, chunk_of(peer, index))?, 0, slots[peer], 0)
                })
            })?;
        }
        Ok(())
    }

    /// `out` becomes this rank's shard of the sum of `input` over ranks, times `scale`.
    pub(crate) fn reduce_scatter(
        &self,
        out: &Tensor,
        input: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Failure> {
        let rounds = self.rounds(CollectiveKind::ReduceScatter);
        let (out, input) = (
            out.f_view(-1).map_err(error_text)?,
            input.f_view(-1).map_err(error_text)?,
        );
        let length = out.numel() as i64;
        let part = self.part_elements(&input);
        let chunk_of = |rank: usize, index: i64| {
            let start = rank as i64 * length;
            chunk(&(start..start + length), index, part)
        };
        let num_chunks = num_chunks(length, part);
        let send = |index| self.send_parts(&rounds, &input, |peer| chunk_of(peer, index));
        send(0)?;
        for index in 0..num_chunks {
            if index + 1 < num_chunks {
                send(index + 1)?;
            }
            rounds.read(|slots, _| {
                let own = slice(&input, chunk_of(self.index(), index))?;
                let into = slice(&out, chunk(&(0..length), index, part))?;
                let overwrites_own = self.size() > 2 && into.data_ptr() == own.data_ptr();
                let partial = if overwrites_own {
                    into.f_empty_like().map_err(error_text)?
                } else {
                    into.shallow_clone()
                };
                self.sum(slots, &own, &partial, &into, scale)
            })?;
        }
        Ok(())
    }

    /// `out` becomes every rank's `input`, in rank order.
    pub(crate) fn all_gather(&self, out: &Tensor, input: &Tensor) -> Result<(), Failure> {
        let rounds = self.rounds(CollectiveKind::AllGather);
        let length = num_bytes(input);
        let mut starts = (0..length).step_by(SLOT_BYTES);
        let send = |start: usize| {
            rounds.write(0, |slot| {
                let end = SLOT_BYTES.min(length - start);
                self.count_sent(end * self.num_peers());
                bytes::copy_out(input, start, &mut slot[..end]).map_err(io_text)
            })
        };
        let mut next = starts.next();
        if let Some(start) = next {
            send(start)?;
        }
        let rows = out.f_view([self.size() as i64, -1]).map_err(error_text)?;
        let row = |rank: usize| rows.f_get(rank as i64).map_err(error_text);
        // The all-gather is in place if the input is this rank's row of the output.
        let mut own = row(self.index())?;
        if own.data_ptr() != input.data_ptr() {
            own.f_copy_(&input.f_view(-1).map_err(error_text)?)
                .map_err(error_text)?;
        }
        let peers = self
            .peers()
            .map(|peer| Ok((peer, row(peer)?)))
            .collect::<Result<Vec<_>, Failure>>()?;
        while let Some(start) = next {
            next = starts.next();
            if let Some(start) = next {
                send(start)?;
            }
            let end = SLOT_BYTES.min(length - start);
            rounds.read(|slots, _| {
                peers.iter().try_for_each(|(peer, row)| {
                    self.count_received(end);
                    bytes::copy_in(row, start, &slots[*peer][..end]).map_err(io_text)
                })
            })?;
        }
        Ok(())
    }

    /// Sends `in_bytes[p]` bytes of `input` to rank `p`, and receives `out_bytes[p]` from it.
    pub(crate) fn all_to_all(
        &self,
        out: &Tensor,
        input: &Tensor,
        out_bytes: &[usize],
        in_bytes: &[usize],
    ) -> Result<(), Failure> {
        let rounds = self.rounds(CollectiveKind::AllToAll);
        let part = self.part_bytes();
        let (to, from) = (ranges(in_bytes), ranges(out_bytes));
        let piece = |range: &Range<usize>, round: usize| {
            let start = (range.start + round * part).min(range.end);
            start..(start + part).min(range.end)
        };
        let own_rounds = self.peers().map(|peer| in_bytes[peer].div_ceil(part)).max();
        let send = |round: usize| {
            rounds.write(own_rounds.unwrap_or(0) as u64, |slot| {
                self.peers().try_for_each(|peer| {
                    let piece = piece(&to[peer], round);
                    let at = position(self.index(), peer) * part;
                    self.count_sent(piece.len());
                    let slot = &mut slot[at..at + piece.len()];
                    bytes::copy_out(input, piece.start, slot).map_err(io_text)
                })
            })
        };
        send(0)?;
        let own = to[self.index()].clone();
        bytes::copy_between(input, own, out, from[self.index()].start).map_err(io_text)?;
        let mut num_rounds = 1;
        let mut round = 0;
        while round < num_rounds {
            rounds.read(|slots, rounds_of| {
                num_rounds = rounds_of.iter().copied().max().unwrap_or(0).max(1) as usize;
                self.peers().try_for_each(|peer| {
                    let piece = piece(&from[peer], round);
                    let at = position(peer, self.index()) * part;
                    self.count_received(piece.len());
                    let slot = &slots[peer][at..at + piece.len()];
                    bytes::copy_in(out, piece.start, slot).map_err(io_text)
                })
            })?;
            round += 1;
            if round < num_rounds {
                send(round)?;
            }
        }
        Ok(())
    }

    fn rounds(&self, kind: CollectiveKind) -> Rounds<'_> {
        Rounds {
            memory: &self.memory,
            sockets: &self.sockets,
            kind,
            sequence: self.sequence,
        }
    }

    fn index(&self) -> usize {
        self.memory.index
    }

    fn size(&self) -> usize {
        self.memory.segments.len()
    }

    fn num_peers(&self) -> usize {
        self.size() - 1
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let index = self.index();
        (0..self.size()).filter(move |rank| *rank != index)
    }

    /// The bytes of a part of a slot, which has one for every peer.
    fn part_bytes(&self) -> usize {
        SLOT_BYTES / self.num_peers() / 64 * 64
    }

    fn part_elements(&self, like: &Tensor) -> i64 {
        (self.part_bytes() / like.kind().elt_size_in_bytes()) as i64
    }

    /// Writes a round with a part of `flat` for every peer.
    fn send_parts(
        &self,
        rounds: &Rounds<'_>,
        flat: &Tensor,
        part_for: impl Fn(usize) -> Range<i64>,
    ) -> Result<(), Failure> {
        let part_bytes = self.part_bytes();
        rounds.write(0, |slot| {
            self.peers().try_for_each(|peer| {
                let part = slice(flat, part_for(peer))?;
                let at = position(self.index(), peer) * part_bytes;
                self.count_sent(num_bytes(&part));
                let slot = &mut slot[at..at + num_bytes(&part)];
                bytes::copy_out(&part, 0, slot).map_err(io_text)
            })
        })
    }

    /// `out` becomes the sum of what all ranks have for this one, times `scale`; `own` is its own term.
    fn sum(
        &self,
        slots: &[&[u8]],
        own: &Tensor,
        partial: &Tensor,
        out: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Failure> {
        let part_bytes = self.part_bytes();
        let term = |rank: usize| {
            if rank == self.index() {
                return own.shallow_clone();
            }
            self.count_received(num_bytes(own));
            let at = position(rank, self.index()) * part_bytes;
            view(&slots[rank][at..], own)
        };
        let terms: Vec<Tensor> = (0..self.size()).map(term).collect();
        add_in_rank_order(&terms, partial, out, scale)
    }

    /// Copies the bytes of a slot from `at` on to those of `into` from `start` on.
    fn receive(&self, into: &Tensor, start: usize, slot: &[u8], at: usize) -> Result<(), Failure> {
        let length = num_bytes(into) - start;
        self.count_received(length);
        bytes::copy_in(into, start, &slot[at..at + length]).map_err(io_text)
    }

    fn count_sent(&self, bytes: usize) {
        self.memory.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count_received(&self, bytes: usize) {
        let received = &self.memory.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A tensor of the type and length of `like` on a part of a slot. It must not outlive the round.
fn view(slot: &[u8], like: &Tensor) -> Tensor {
    assert!(
        num_bytes(like) <= slot.len(),
        "a part is larger than its slot"
    );
    let length = like.numel() as i64;
    // SAFETY: the part is as long as the tensor, and aligned, because parts begin at multiples of 64 bytes. Callers drop the tensor before the round ends, and write to it only if the slot is this rank's to write.
    unsafe { Tensor::from_blob(slot.as_ptr(), &[length], &[1], like.kind(), Device::Cpu) }
}

/// The position of a peer's part in the slot of a rank.
fn position(owner: usize, reader: usize) -> usize {
    if reader < owner { reader } else { reader - 1 }
}

/// Chunk `index` of a range; empty past its end.
fn chunk(range: &Range<i64>, index: i64, length: i64) -> Range<i64> {
    let start = (range.start + index * length).min(range.end);
    start..(start + length).min(range.end)
}

/// There is at least one, so that all ranks take part in a round.
fn num_chunks(length: i64, part: i64) -> i64 {
    ((length + part - 1) / part).max(1)
}

/// Consecutive ranges of these lengths.
fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |length: &usize| {
        let start = end;
        end += length;
        start..end
    };
    lengths.iter().map(next).collect()
}

fn num_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

fn io_text(error: std::io::Error) -> Failure {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Kind;

    use super::*;
    use crate::shared_memory::segment::Segment;

    /// Runs `work` as every rank of a group, each in a thread, and returns the results in rank order.
    fn on_ranks<T: Send>(
        size: usize,
        work: impl Fn(usize, &SharedGroup) -> Result<T, Failure> + Sync,
    ) -> Vec<Result<T, Failure>> {
        let created: Vec<_> = (0..size).map(|_| Segment::create().unwrap()).collect();
        let groups = (0..size).map(|index| {
            let opened = created.iter().map(|(_, address, _)| Segment::open(address));
            let mut segments: Vec<Segment> = opened.collect::<Result<_, _>>().unwrap();
            // Only the creator may write its data.
            segments[index] = Segment::create_from(&created[index].2).unwrap();
            let timeout = std::time::Duration::from_millis(200);
            SharedGroup {
                memory: Arc::new(SharedMemory::new(index, segments, timeout)),
                sockets: Arc::default(),
                sequence: 5,
            }
        });
        let groups: Vec<SharedGroup> = groups.collect();
        let work = &work;
        std::thread::scope(|scope| {
            let run = |(index, group)| scope.spawn(move || work(index, group));
            let threads: Vec<_> = groups.iter().enumerate().map(run).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    /// Values of a rank whose sums are exact.
    fn values(rank: usize, length: usize) -> Tensor {
        let start = (1000 * rank) as f64;
        let length = length as i64;
        let counted = Tensor::arange(length, (Kind::Float, Device::Cpu));
        counted.remainder(977.0) + start
    }

    fn lengths() -> impl Strategy<Value = usize> {
        // More than a slot, too.
        prop_oneof![0..20usize, 1000..2000usize, 131_000..400_000usize]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        #[test]
        fn all_reduce_sums(size in 2..5usize, length in lengths(), mean in any::<bool>()) {
            let scale = mean.then(|| 1.0 / size as f64);
            let terms = (0..size).map(|rank| values(rank, length));
            let expected = terms.reduce(|sum, term| sum + term).unwrap() * scale.unwrap_or(1.0);
            let results = on_ranks(size, |rank, group| {
                let tensor = values(rank, length);
                // Twice, because the second collective finds the slots used.
                group.all_reduce(&tensor, None)?;
                tensor.shallow_clone().copy_(&values(rank, length));
                group.all_reduce(&tensor, scale)?;
                Ok(tensor)
            });
            for result in results {
                prop_assert_eq!(&result.unwrap(), &expected);
            }
        }

        #[test]
        fn reduce_scatter_and_all_gather_are_an_all_reduce(size in 2..5usize, length in lengths(), in_place in any::<bool>()) {
            let terms = (0..size).map(|rank| values(rank, size * length));
            let expected = terms.reduce(|sum, term| sum + term).unwrap();
            let results = on_ranks(size, |rank, group| {
                let input = values(rank, size * length);
                let own = input.narrow(0, (rank * length) as i64, length as i64);
                let out = if in_place { own } else { own.zeros_like() };
                group.reduce_scatter(&out, &input, None)?;
                let all = if in_place { input } else { input.zeros_like() };
                group.all_gather(&all, &out)?;
                let bytes = group.memory.wire_bytes();
                Ok((all, bytes))
            });
            for result in results {
                let (all, bytes) = result.unwrap();
                prop_assert_eq!(&all, &expected);
                let sent = (2 * (size - 1) * length * 4) as u64;
                prop_assert_eq!((bytes.sent, bytes.received), (sent, sent));
            }
        }

        #[test]
        fn all_to_all_exchanges_splits(size in 2..5usize, lengths in prop::collection::vec(lengths(), 16)) {
            let length = |from: usize, to: usize| lengths[from * 4 + to];
            let results = on_ranks(size, |rank, group| {
                let parts = |pairs: &mut dyn Iterator<Item = (usize, usize)>| {
                    let parts = pairs.map(|(from, to)| values(from * 10 + to, length(from, to)));
                    Tensor::cat(&parts.collect::<Vec<_>>(), 0)
                };
                let bytes = |pairs: &mut dyn Iterator<Item = (usize, usize)>| {
                    pairs.map(|(from, to)| 4 * length(from, to)).collect::<Vec<_>>()
                };
                let sent = || (0..size).map(|peer| (rank, peer));
                let received = || (0..size).map(|peer| (peer, rank));
                let input = parts(&mut sent());
                let expected = parts(&mut received());
                let out = expected.zeros_like();
                group.all_to_all(&out, &input, &bytes(&mut received()), &bytes(&mut sent()))?;
                Ok(out == expected)
            });
            for result in results {
                prop_assert!(result.unwrap());
            }
        }
    }

    #[test]
    fn ranks_in_different_collectives_notice() {
        let results = on_ranks(2, |rank, group| {
            let tensor = values(rank, 8);
            match rank {
                0 => group.all_reduce(&tensor, None),
                _ => group.all_gather(&Tensor::zeros(16, (Kind::Float, Device::Cpu)), &tensor),
            }
        });
        let message = results[0].as_ref().unwrap_err();
        assert!(
            message.contains("rank 1 of the group is in all_gather #5"),
            "{message}"
        );
    }

    #[test]
    fn a_missing_peer_is_a_timeout() {
        let results = on_ranks(2, |rank, group| match rank {
            0 => group.all_reduce(&values(0, 8), None),
            _ => Ok(()),
        });
        let message = results[0].as_ref().unwrap_err();
        assert!(
            message.starts_with("Timed out waiting 200ms for rank 1"),
            "{message}"
        );
    }
}
