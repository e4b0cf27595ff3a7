"""JSON schemas made at random from a seed, of every keyword that is kept to, and some written by hand."""

FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname")
PATTERNS = (r"^[a-c]{2,4}$", r"^\d{3}-\d{2}$", r"^(yes|no)$", r"ab", r"^x")


class SchemaMaker:
    """Makes schemas from one source of chance."""

    def __init__(self, rng):
        self._rng = rng

    def schema(self, depth=0):
        makers = [self._string, self._integer, self._number, self._constant, self._enum, self._word]
        if depth < 3:
            makers += [self._array, self._object, self._object, self._any_of, self._one_of, self._all_of, self._tuple]
        made = self._rng.choice(makers)(depth)
        if self._maybe(0.1):
            made["description"] = "something"
        return made

    def root(self):
        """A schema whose whole is an object, with definitions now and then."""
        made = self._object(0)
        if self._maybe(0.3):
            made["$defs"] = {"thing": self.schema(2), "node": self._node()}
            made.setdefault("properties", {})["ref"] = {"$ref": self._rng.choice(["#/$defs/thing", "#/$defs/node"])}
        return made

    def _maybe(self, chance):
        return self._rng.random() < chance

    def _node(self):
        rest = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        properties = {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": rest}
        return {
            "type": "object",
            "properties": properties,
            "required": ["value", "next"],
            "additionalProperties": False,
        }

    def _word(self, depth):
        return self._rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])

    def _string(self, depth):
        kind = self._rng.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._rng.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._rng.choice(FORMATS)}
        low = self._rng.randrange(4)
        made = {"type": "string", "minLength": low, "maxLength": low + self._rng.randrange(8)}
        if kind == 2:
            made.pop(self._rng.choice(["minLength", "maxLength"]))
        return made

    def _integer(self, depth):
        low = self._rng.randrange(-200, 200)
        made = {"type": "integer", "minimum": low, "maximum": low + self._rng.randrange(1, 300)}
        if self._maybe(0.3):
            made["exclusiveMinimum"] = made.pop("minimum") - 1
        if self._maybe(0.3):
            made = {"type": "integer", "multipleOf": self._rng.randrange(1, 20)}
        return made

    def _number(self, depth):
        low = self._rng.randrange(-50, 50)
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + self._rng.randrange(1, 100)}

    def _constant(self, depth):
        return {"const": self._rng.choice([1, -2.5, 'a"b\\c', None, True, [1, {"x": []}], {"é": "你"}])}

    def _enum(self, depth):
        return {
            "enum": self._rng.sample([1, 2, "one", "two\n", None, False, 0.5, [], {"k": 1}], self._rng.randrange(1, 5))
        }

    def _array(self, depth):
        low = self._rng.randrange(3)
        made = {"type": "array", "items": self.schema(depth + 1), "minItems": low}
        if self._maybe(0.7):
            made["maxItems"] = low + self._rng.randrange(3)
        return made

    def _tuple(self, depth):
        n = self._rng.randrange(1, 3)
        items = self._rng.choice([False, self.schema(depth + 1)])
        return {
            "type": "array",
            "prefixItems": [self.schema(depth + 1) for _ in range(n)],
            "items": items,
            "minItems": n,
        }

    def _object(self, depth):
        names = self._rng.sample(["a", "b", "name", "with space", 'quo"te', "é", "$ref2"], self._rng.randrange(4))
        made = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        made["required"] = [name for name in names if self._maybe(0.6)]
        kind = self._rng.randrange(4)
        if kind < 2:
            made["additionalProperties"] = False
        elif kind == 2:
            made["additionalProperties"] = self.schema(depth + 2)
        if self._maybe(0.15):
            made["patternProperties"] = {"^p_": self.schema(depth + 2)}
        return made

    def _any_of(self, depth):
        return {"anyOf": [self.schema(depth + 1) for _ in range(self._rng.randrange(1, 4))]}

    def _one_of(self, depth):
        tags = self._rng.sample(["cat", "dog", "fish"], 2)
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": self.schema(depth + 1)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for tag in tags
        ]
        return {"oneOf": kinds}

    def _all_of(self, depth):
        one = {"type": "object", "properties": {"x": self.schema(depth + 1)}, "required": ["x"]}
        other = {"properties": {"y": self.schema(depth + 1)}, "required": ["y"]}
        return {"allOf": [one, other]}


BY_HAND = {
    "true": True,
    "empty": {},
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "min items": {"type": "array", "minItems": 2, "items": {"type": "integer"}},
    "required without properties": {"type": "object", "required": ["x"]},
    "minProperties": {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
    "maxProperties": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "integer"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": False,
    },
    "properties and patterns": {
        "type": "object",
        "properties": {"b": {"type": "string"}},
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
    },
    "a property under two rules": {
        "type": "object",
        "properties": {"ab": {"type": "integer", "minimum": 3}},
        "patternProperties": {"^a": {"maximum": 9}},
        "required": ["ab"],
        "additionalProperties": False,
    },
    "pattern and maxLength": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "format and pattern": {"type": "string", "format": "date", "pattern": "^20"},
    "limits without a type": {"minimum": 3, "maxLength": 2},
    "types with limits": {"type": ["string", "integer", "null"], "minLength": 2, "maximum": 5},
    "multipleOf of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "multipleOf and bounds": {"type": "integer", "multipleOf": 7, "minimum": 30, "maximum": 60},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "allOf of limits": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}],
    },
    "a false property": {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}},
    "prefix longer than what is there": {"type": "array", "prefixItems": [{"type": "string"}], "minItems": 3},
    "items of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "boolean"}],
        "additionalItems": False,
        "minItems": 1,
    },
    "definitions": {"$ref": "#/definitions/n", "definitions": {"n": {"type": "string", "maxLength": 4}}},
    "recursion": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}},
                "required": ["children"],
                "additionalProperties": False,
            }
        },
    },
    "enum within a type": {"type": "string", "enum": ["a", "b", 3]},
    "const beside a type": {
        "type": "object",
        "properties": {"a": {"const": 5}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "annotations": {
        "type": "string",
        "title": "t",
        "default": "x",
        "examples": [],
        "x-own": 1,
        "$comment": "c",
        "maxLength": 3,
    },
}
