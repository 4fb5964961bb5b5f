//! Counters of everything since the ledger was created.
//!
//! Counters only grow, so the difference of two snapshots is what happened in between.

use std::{collections::BTreeMap, ops::Sub};

use serde::{Serialize, Serializer};

use crate::{CollectiveKind, MemoryKind, Purpose, SpanKind};

/// The total of the collectives of one kind and purpose.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Total {
    /// The number of collectives.
    pub count: u64,
    /// The size of the inputs.
    pub payload_bytes: u64,
    /// The bytes sent over the network.
    pub sent_bytes: u64,
}

/// The total of the spans of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct SpanTotal {
    /// The number of spans.
    pub count: u64,
    /// The sum of their durations.
    pub duration_ns: u64,
}

/// The total of all operator calls.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct OperatorTotal {
    /// The number of calls.
    pub count: u64,
    /// The sum of their floating-point operations.
    pub flops: u64,
}

/// The total of the memory of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct MemoryTotal {
    /// The number of allocations.
    pub num_allocations: u64,
    /// The allocated bytes.
    pub allocated_bytes: u64,
    /// The released bytes.
    pub released_bytes: u64,
}

/// The counters of a ledger. Kinds that never occurred are absent.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Totals {
    /// Collectives by kind and purpose.
    #[serde(serialize_with = "as_rows")]
    pub collectives: BTreeMap<(CollectiveKind, Purpose), Total>,
    /// The sum of the durations of collectives, by purpose.
    pub communication_ns: BTreeMap<Purpose, u64>,
    /// The time that callers blocked in `wait`.
    pub waited_ns: u64,
    /// Spans by kind.
    pub spans: BTreeMap<SpanKind, SpanTotal>,
    /// Operators.
    pub operators: OperatorTotal,
    /// Memory by kind.
    pub memory: BTreeMap<MemoryKind, MemoryTotal>,
}

impl Totals {
    /// The total of one kind over all purposes.
    pub fn of_kind(&self, kind: CollectiveKind) -> Total {
        self.sum_where(|(each, _)| each == kind)
    }

    /// The total of one purpose over all kinds.
    pub fn of_purpose(&self, purpose: Purpose) -> Total {
        self.sum_where(|(_, each)| each == purpose)
    }

    /// The total of all collectives.
    pub fn all_collectives(&self) -> Total {
        self.sum_where(|_| true)
    }

    fn sum_where(&self, matches: impl Fn((CollectiveKind, Purpose)) -> bool) -> Total {
        self.collectives
            .iter()
            .filter(|(key, _)| matches(**key))
            .fold(Total::default(), |sum, (_, each)| Total {
                count: sum.count + each.count,
                payload_bytes: sum.payload_bytes + each.payload_bytes,
                sent_bytes: sum.sent_bytes + each.sent_bytes,
            })
    }
}

/// What happened between `earlier` and `self`. After a reset in between, differences saturate at zero.
impl Sub<&Totals> for &Totals {
    type Output = Totals;

    fn sub(self, earlier: &Totals) -> Totals {
        Totals {
            collectives: differences(&self.collectives, &earlier.collectives),
            communication_ns: differences(&self.communication_ns, &earlier.communication_ns),
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

/// A counter that only grows.
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

/// Serializes the map as a list of rows, because a key in JSON cannot be a pair.
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
        fn subtraction_inverts_addition(a in any_totals(), b in any_totals()) {
            prop_assert_eq!(&sum(&a, &b) - &a, b);
            prop_assert_eq!(&a - &a, Totals::default());
            prop_assert_eq!(&a - &Totals::default(), a.clone());
        }

        #[test]
        fn kinds_and_purposes_have_the_same_total(totals in any_totals()) {
            let all = totals.all_collectives();
            let by_kind: u64 = CollectiveKind::ALL.map(|kind| totals.of_kind(kind).sent_bytes).iter().sum();
            let by_purpose: u64 = Purpose::ALL.map(|each| totals.of_purpose(each).sent_bytes).iter().sum();
            prop_assert_eq!(by_kind, all.sent_bytes);
            prop_assert_eq!(by_purpose, all.sent_bytes);
        }
    }

    #[test]
    fn collectives_are_serialized_as_rows() {
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
