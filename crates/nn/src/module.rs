//! A module is whatever has parameters.
//!
//! The trait says nothing of how a module computes: only which parameters it owns and in which
//! order. Values that carry none (sizes, tables) are modules without parameters, and containers
//! are their elements, so that `#[derive(Module)]` can simply visit every field.

use std::rc::Rc;

use tch::Tensor;

use crate::Parameter;

/// Something that owns parameters, in a fixed order.
///
/// Deriving it visits the fields in the order in which they are written.
pub trait Module {
    /// Shows every owned parameter to `visitor`, each once.
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter));

    /// Every owned parameter, in order.
    fn parameters(&self) -> Vec<Parameter> {
        let mut parameters = Vec::new();
        self.visit(&mut |parameter| parameters.push(parameter.clone()));
        parameters
    }

    /// How many elements the parameters have, over the whole mesh.
    fn num_parameters(&self) -> u64 {
        let mut count = 0;
        self.visit(&mut |parameter| count += parameter.num_elements());
        count
    }
}

impl Module for Parameter {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        visitor(self);
    }
}

macro_rules! without_parameters {
    ($($plain:ty),*) => {
        $(impl Module for $plain {
            fn visit(&self, _: &mut dyn FnMut(&Parameter)) {}
        })*
    };
}

without_parameters!(bool, i64, u64, usize, f64, String, Tensor);

impl<M: Module> Module for Option<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.iter().for_each(|module| module.visit(visitor));
    }
}

impl<M: Module> Module for Vec<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.iter().for_each(|module| module.visit(visitor));
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        (**self).visit(visitor);
    }
}

impl<M: Module + ?Sized> Module for Rc<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        (**self).visit(visitor);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Builder, Init, Module, Parameter, Result};

    #[derive(Module)]
    struct Pair<M> {
        left: M,
        right: Option<M>,
        width: i64,
    }

    #[derive(Module)]
    struct Tree {
        leaves: Vec<Pair<Parameter>>,
        #[module(skip)]
        borrowed: Parameter,
        #[module(skip)]
        _note: &'static str,
        root: Box<dyn Module>,
    }

    #[derive(Module)]
    struct Nothing {}

    fn leaf(name: &str) -> Result<Parameter> {
        Builder::new(1).parameter(name, &[2, 3], Init::Zeros)
    }

    #[test]
    fn derive_visits_fields_in_order_and_leaves_out_what_is_skipped() -> Result<()> {
        let tree = Tree {
            leaves: vec![
                Pair {
                    left: leaf("a")?,
                    right: Some(leaf("b")?),
                    width: 3,
                },
                Pair {
                    left: leaf("c")?,
                    right: None,
                    width: 3,
                },
            ],
            borrowed: leaf("not mine")?,
            _note: "no module at all",
            root: Box::new(leaf("d")?),
        };
        let names: Vec<_> = tree
            .parameters()
            .iter()
            .map(|p| p.name().to_owned())
            .collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
        assert_eq!(tree.num_parameters(), 4 * 6);
        assert_eq!(tree.leaves[0].width, 3);
        assert_eq!(tree.borrowed.name(), "not mine");
        assert_eq!(Nothing {}.num_parameters(), 0);
        Ok(())
    }
}
