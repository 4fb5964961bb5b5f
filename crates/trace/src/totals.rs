//! Counts of everything since the ledger began.
//!
//! Totals only grow, so the difference of two of them is what happened in between.

use std::{collections::BTreeMap, ops::Sub};

use serde::{Serialize, Serializer};

use crate::{CollectiveKind, MemoryKind, Purpose, SpanKind};

/// Collectives of one kind and purpose.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Total {
    /// How many there were.
    pub count: u64,
    /// The bytes handed in.
    pub payload_bytes: u64,
    /// The bytes put on the wire.
    pub sent_bytes: u64,
}

/// Spans of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct SpanTotal {
    /// How many there were.
    pub count: u64,
    /// How long they took together.
    pub duration_ns: u64,
}

/// Operators of every name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct OperatorTotal {
    /// How many there were.
    pub count: u64,
    /// Their floating-point operations.
    pub flops: u64,
}

/// Memory of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct MemoryTotal {
    /// How often memory was taken.
    pub num_allocations: u64,
    /// The bytes taken.
    pub allocated_bytes: u64,
    /// The bytes given back.
    pub released_bytes: u64,
}

/// What a ledger has counted. Kinds that never occurred are absent.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Totals {
    /// Collectives by kind and purpose.
    #[serde(serialize_with = "as_rows")]
    pub collectives: BTreeMap<(CollectiveKind, Purpose), Total>,
    /// How long bytes were on their way, by purpose.
    pub moving_ns: BTreeMap<Purpose, u64>,
    /// How long callers stood in `wait`.
    pub waited_ns: u64,
    /// Spans by kind.
    pub spans: BTreeMap<SpanKind, SpanTotal>,
    /// Operators.
    pub operators: OperatorTotal,
    /// Memory by kind.
    pub memory: BTreeMap<MemoryKind, MemoryTotal>,
}

impl Totals {
    /// Collectives of one kind, for every purpose.
    pub fn of_kind(&self, kind: CollectiveKind) -> Total {
        self.sum_where(|(each, _)| each == kind)
    }

    /// Collectives for one purpose, of every kind.
    pub fn of_purpose(&self, purpose: Purpose) -> Total {
        self.sum_where(|(_, each)| each == purpose)
    }

    /// All collectives.
    pub fn all_collectives(&self) -> Total {
        self.sum_where(|_| true)
    }

    fn sum_where(&self, holds: impl Fn((CollectiveKind, Purpose)) -> bool) -> Total {
        self.collectives
            .iter()
            .filter(|(key, _)| holds(**key))
            .fold(Total::default(), |sum, (_, each)| Total {
                count: sum.count + each.count,
                payload_bytes: sum.payload_bytes + each.payload_bytes,
                sent_bytes: sum.sent_bytes + each.sent_bytes,
            })
    }
}

/// What happened between `earlier` and `self`. A reset in between reads as nothing, never as less.
impl Sub<&Totals> for &Totals {
    type Output = Totals;

    fn sub(self, earlier: &Totals) -> Totals {
        Totals {
            collectives: differences(&self.collectives, &earlier.collectives),
            moving_ns: differences(&self.moving_ns, &earlier.moving_ns),
            waited_ns: self.waited_ns.saturating_sub(earlier.waited_ns),
            spans: differences(&self.spans, &earlier.spans),
            operators: self.operators.since(&earlier.operators),
            memory: differences(&self.memory, &earlier.memory),
        }
    }
}

impl Sub for Totals {
    type Output = Totals;

    fn sub(self, earlier: Totals) -> Totals {
        &self - &earlier
    }
}

/// A count that only grows.
trait Since: Copy + Default + PartialEq {
    fn since(&self, earlier: &Self) -> Self;
}

impl Since for u64 {
    fn since(&self, earlier: &u64) -> u64 {
        self.saturating_sub(*earlier)
    }
}

macro_rules! since {
    ($($total:ident { $($field:ident),+ })+) => {
        $(impl Since for $total {
            fn since(&self, earlier: &$total) -> $total {
                $total { $($field: self.$field.saturating_sub(earlier.$field)),+ }
            }
        })+
    };
}

since! {
    Total { count, payload_bytes, sent_bytes }
    SpanTotal { count, duration_ns }
    OperatorTotal { count, flops }
    MemoryTotal { num_allocations, allocated_bytes, released_bytes }
}

fn differences<K: Ord + Copy, T: Since>(
    later: &BTreeMap<K, T>,
    earlier: &BTreeMap<K, T>,
) -> BTreeMap<K, T> {
    later
        .iter()
        .map(|(key, total)| {
            (
                *key,
                total.since(&earlier.get(key).copied().unwrap_or_default()),
            )
        })
        .filter(|(_, total)| *total != T::default())
        .collect()
}

/// A pair cannot be a key in JSON, so the map becomes a list of rows.
fn as_rows<S: Serializer>(
    collectives: &BTreeMap<(CollectiveKind, Purpose), Total>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Row<'a> {
        kind: CollectiveKind,
        purpose: Purpose,
        #[serde(flatten)]
        total: &'a Total,
    }
    serializer.collect_seq(collectives.iter().map(|(&(kind, purpose), total)| Row {
        kind,
        purpose,
        total,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_total() -> impl Strategy<Value = Total> {
        (1u64..1000, 0u64..1 << 40, 0u64..1 << 40).prop_map(|(count, payload_bytes, sent_bytes)| {
            Total {
                count,
                payload_bytes,
                sent_bytes,
            }
        })
    }

    fn any_totals() -> impl Strategy<Value = Totals> {
        let key = (
            prop::sample::select(&CollectiveKind::ALL[..]),
            prop::sample::select(&Purpose::ALL[..]),
        );
        (
            prop::collection::btree_map(key, any_total(), 0..8),
            0u64..1 << 40,
        )
            .prop_map(|(collectives, waited_ns)| Totals {
                collectives,
                waited_ns,
                ..Totals::default()
            })
    }

    fn sum(a: &Totals, b: &Totals) -> Totals {
        let mut sum = a.clone();
        sum.waited_ns += b.waited_ns;
        for (key, each) in &b.collectives {
            let total = sum.collectives.entry(*key).or_default();
            total.count += each.count;
            total.payload_bytes += each.payload_bytes;
            total.sent_bytes += each.sent_bytes;
        }
        sum
    }

    proptest! {
        #[test]
        fn the_difference_is_what_came_in_between(a in any_totals(), b in any_totals()) {
            prop_assert_eq!(&sum(&a, &b) - &a, b);
            prop_assert_eq!(&a - &a, Totals::default());
            prop_assert_eq!(&a - &Totals::default(), a.clone());
        }

        #[test]
        fn kinds_and_purposes_cut_the_same_whole(totals in any_totals()) {
            let all = totals.all_collectives();
            let by_kind: u64 = CollectiveKind::ALL.map(|kind| totals.of_kind(kind).sent_bytes).iter().sum();
            let by_purpose: u64 = Purpose::ALL.map(|each| totals.of_purpose(each).sent_bytes).iter().sum();
            prop_assert_eq!(by_kind, all.sent_bytes);
            prop_assert_eq!(by_purpose, all.sent_bytes);
        }
    }

    #[test]
    fn collectives_are_written_as_rows() {
        let total = Total {
            count: 1,
            payload_bytes: 8,
            sent_bytes: 4,
        };
        let key = (CollectiveKind::AllReduce, Purpose::Gradient);
        let totals = Totals {
            collectives: BTreeMap::from([(key, total)]),
            ..Totals::default()
        };
        assert_eq!(
            serde_json::to_value(&totals).unwrap()["collectives"],
            serde_json::json!([{
                "kind": "all_reduce",
                "purpose": "gradient",
                "count": 1,
                "payload_bytes": 8,
                "sent_bytes": 4,
            }])
        );
    }
}
