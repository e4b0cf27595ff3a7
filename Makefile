.PHONY: setup check fix test test-all bench native-test

setup:
	pip install -e '.[test]'

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	clang-format --dry-run --Werror $$(git ls-files 'native/*.cpp' 'native/*.hpp')
	typos

fix:
	ruff check --fix .
	ruff format .
	clang-format -i $$(git ls-files 'native/*.cpp' 'native/*.hpp')

test:
	pytest

test-all:
	pytest -m ""

bench:
	tiercel bench latency
	tiercel bench throughput
	tiercel bench startup

native-test:
	cmake -S . -B build/native-test -DTIERCEL_TESTS=ON -DTIERCEL_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	cmake --build build/native-test -j 2
	build/native-test/tiercel_tests
