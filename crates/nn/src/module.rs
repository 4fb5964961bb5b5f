//! Modules: types that own parameters.
//!
//! The trait covers only which parameters a module owns and in which order, not what it computes. Plain values
//! (sizes, tensors) are modules without parameters, and a container is a module if its elements are, so that
//! `#[derive(Module)]` can visit every field.

use std::rc::Rc;

use tch::Tensor;

use crate::Parameter;

/// A type that owns parameters, in a fixed order.
///
/// `#[derive(Module)]` visits the fields in declaration order.
pub trait Module {
    /// Calls `visitor` once for every owned parameter.
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter));

    /// All owned parameters, in order.
    fn parameters(&self) -> Vec<Parameter> {
        let mut parameters = Vec::new();
        self.visit(&mut |parameter| parameters.push(parameter.clone()));
        parameters
    }

    /// The number of elements of all parameters, by their global shapes.
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
        tied: Parameter,
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
    fn derive_visits_fields_in_order_except_skipped_ones() -> Result<()> {
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
            tied: leaf("not owned")?,
            _note: "not a module",
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
        assert_eq!(tree.tied.name(), "not owned");
        assert_eq!(Nothing {}.num_parameters(), 0);
        Ok(())
    }
}
